"""What one connection counts as it goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

N_BUCKETS = 32


@dataclass(slots=True)
class Counters:
    """Running totals. Written by the connection's own threads under its lock or by one thread alone; read by anybody.

    `round_trips[i]` counts answers that took from 2^(i-1) up to 2^i microseconds after their command was written.
    """

    commands: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0
    answers: int = 0
    round_trip_s: float = 0.0
    round_trips: list[int] = field(default_factory=lambda: [0] * N_BUCKETS)

    def answered(self, seconds: float) -> None:
        self.answers += 1
        self.round_trip_s += seconds
        self.round_trips[min(int(seconds * 1e6).bit_length(), N_BUCKETS - 1)] += 1
