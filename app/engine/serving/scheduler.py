"""Who computes what next: the only door between requests and ubatches. Pure: the caller owns the clock and the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.engine.request import GenerateRequest
from app.engine.serving.types import Budget, Choice, Ended, Report, SchedulerConfig, Ubatch
from app.engine.service import SlotInfo


class Scheduler:
    """Continuous batching over one pool of KV blocks.

    The step loop: `add` and `abort` what callers asked for; `expire(now)`; while few enough ubatches are in flight,
    `schedule(now)` and submit what comes to the lanes; when a ubatch's logits are there, draw a token for each of
    `live_samples(ubatch)` and `commit` them, in order of ubatch id.

    Not thread-safe; one thread owns it.
    """

    def __init__(self, config: SchedulerConfig) -> None: ...

    def add(self, request: GenerateRequest, now: float, *, namespace: str = "") -> None:
        """Put a request into the queue. `namespace`: whatever else than tokens changes the KV (adapters, images).

        Raises QueueFull (with a guess when to try again) or ContextLengthExceeded.
        """
        ...

    def abort(self, request_id: str) -> Ended | None:
        """Forget a request at any moment, also with rows of it in flight. None when it is not known (any more)."""
        ...

    def expire(self, now: float) -> tuple[Ended, ...]:
        """Abort every request whose deadline has passed."""
        ...

    def schedule(self, now: float, budget: Budget = Budget()) -> Ubatch | None:
        """Form the next ubatch, or None when nothing can be computed before the next commit or add."""
        ...

    def is_live(self, request_id: str) -> bool:
        """Whether a token drawn for this request would still be wanted."""
        ...

    def commit(self, ubatch: Ubatch, choices: Mapping[str, Choice], now: float) -> tuple[Ended, ...]:
        """Take in a ubatch that has run: a choice for every live request with a SAMPLE output (others are ignored).

        Returns the requests that are over now. Ubatches of an earlier epoch (see `invalidate_cache`) are ignored.
        """
        ...

    def invalidate_cache(self) -> None:
        """Everything on the devices is lost: forget KV, snapshots and ubatches in flight; running requests go back to the
        queue and are recomputed from their tokens, drawn ones included."""
        ...

    def fail_all(self) -> tuple[Report, ...]:
        """End every request without an answer (the caller tells them why) and forget the cache as above."""
        ...

    def report(self, request_id: str) -> Report | None: ...

    def slots(self) -> Sequence[SlotInfo]:
        """One entry per slot, in order."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Totals and gauges by name."""
        ...

    def check_integrity(self) -> None:
        """Verify every invariant of slots, blocks, tree and snapshots; raises InternalError naming what is wrong."""
        ...
