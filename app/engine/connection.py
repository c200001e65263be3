"""What a connection to a remote device did, as plain numbers: for metrics, logs, and whoever counts bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStats:
    """A snapshot of one connection since it was made.

    `number` is the connection's own in this process, since several devices may share one. `round_trips[i]` counts
    answers that took from 2^(i-1) up to 2^i microseconds after their command was written, `round_trip_s` is the sum of
    all. `queued` commands are not written yet, `in_flight` ones wait for their answer.
    """

    number: int
    endpoint: str
    is_up: bool
    commands: dict[str, int]
    sent_bytes: int
    received_bytes: int
    answers: int
    round_trip_s: float
    round_trips: tuple[int, ...]
    queued: int
    in_flight: int
