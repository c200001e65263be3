"""One request on its way through the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from app.engine.request import GenerateRequest
from app.engine.serving.kv import Block
from app.engine.serving.nodes import Tail
from app.engine.serving.types import Report, blocks_for


class Phase(Enum):
    """Where a request stands."""

    WAITING = auto()  # in the queue: never started, or preempted
    RUNNING = auto()  # has a slot
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and how far they have come.

    `tokens`: prompt and drawn tokens. Rows of the first `n_scheduled` are submitted. KV of the first `n_kv` is in the
    blocks (never less; more only when a recurrent state is recomputed over KV that the cache had). `is_sampling`: the
    last known token's row is submitted and its outcome not committed yet, so there is nothing to schedule; with
    `is_ahead` the row of the token that will be drawn from it is submitted as well.
    `n_scored`: leading rows whose prompt-logprob outputs are submitted, `n_scored_done`: committed.
    `cuts`: ascending positions at which a prompt chunk must end, because a snapshot is taken there.
    """

    request: GenerateRequest
    namespace: str
    arrival: int
    added_s: float
    max_new: int
    is_caching: bool
    tokens: list[int]
    n_prompt: int
    phase: Phase = Phase.WAITING
    slot: int = -1
    started_s: float | None = None
    blocks: list[Block] = field(default_factory=list)
    tail: Tail | None = None
    n_kv: int = 0
    n_scheduled: int = 0
    is_sampling: bool = False
    is_ahead: bool = False
    n_processed: int = 0
    n_cached: int | None = None  # None until it first gets a slot
    n_matched: int = -1  # what the cache had when last looked: a hint while waiting; -1: not looked yet
    n_scored: int = 0
    n_scored_done: int = 0
    n_preemptions: int = 0
    last_ubatch: int = -1
    cuts: tuple[int, ...] = ()
    shared: dict[int, int] = field(default_factory=dict)  # common prefix with other requests, by their arrival
    _indices: NDArray[np.int32] | None = None
    _generation: int = -1

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def n_known(self) -> int:
        return len(self.tokens)

    @property
    def n_new(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Rows to schedule before the next token can be drawn."""
        return 0 if self.is_sampling else len(self.tokens) - self.n_scheduled

    @property
    def is_decoding(self) -> bool:
        """The one row left is that of a token it drew itself."""
        n_known = len(self.tokens)
        return n_known - self.n_scheduled == 1 and n_known > self.n_prompt and not self.is_sampling

    @property
    def is_pooled(self) -> bool:
        """It wants hidden states, not tokens."""
        return self.request.pooling is not None

    @property
    def wants_sample(self) -> bool:
        return self.max_new > 0

    @property
    def match_limit(self) -> int:
        """Tokens a cached prefix may cover: one row must be computed for logits, and rows to be scored too."""
        if self.request.prompt_logprobs and self.n_scored < self.n_prompt - 1:
            return self.n_scored
        return len(self.tokens) - 1

    @property
    def n_blocks_missing(self) -> int:
        """Blocks it will still take for the tokens known now."""
        return max(0, blocks_for(self.n_known) - len(self.blocks))

    def is_late(self, now: float) -> bool:
        deadline_s = self.request.deadline_s
        return deadline_s is not None and now - self.added_s >= deadline_s

    def requeue(self) -> None:
        """It waits again; what it knew about the cache and others is out of date."""
        self.phase = Phase.WAITING
        self.n_matched = -1
        self.shared.clear()

    def forget_memory(self) -> None:
        """What it had on the devices is gone, its tokens in flight too."""
        self.blocks, self.tail, self.slot = [], None, -1
        self.n_kv = self.n_scheduled = 0
        self.n_scored = self.n_scored_done
        self.is_sampling = self.is_ahead = False

    def chunk(self, n_rows: int) -> int:
        """As many of `n_rows` as the next chunk may have: not beyond what is known, nor a snapshot's position."""
        end = min(self.n_scheduled + n_rows, len(self.tokens))
        for cut in self.cuts:
            if cut > self.n_scheduled:
                return min(end, cut) - self.n_scheduled
        return end - self.n_scheduled

    def indices(self, generation: int) -> NDArray[np.int32]:
        """Block indices as an array, made anew only when they changed."""
        if self._indices is None or self._generation != generation or len(self._indices) != len(self.blocks):
            self._indices = np.array([block.index for block in self.blocks], dtype=np.int32)
            self._generation = generation
        return self._indices

    def forget_indices(self) -> None:
        """The list of blocks is another one; equal lengths must not hide it."""
        self._indices = None

    def report(self) -> Report:
        return Report(
            request_id=self.id,
            slot=self.slot,
            prompt_tokens=self.n_prompt,
            cached_tokens=self.n_cached or 0,
            processed_tokens=self.n_processed,
            completion_tokens=self.n_new,
            n_preemptions=self.n_preemptions,
            added_s=self.added_s,
            started_s=self.started_s,
        )


def shared_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences have in common. Slices are compared in C, so this bisects."""
    low, high = 0, min(len(a), len(b))
    if a[:64] != b[:64]:  # most pairs; spares copying two long prompts
        high = min(high, 64)
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def snapshot_cuts(
    n_prompt: int, message_starts: tuple[int, ...], *, interval_tokens: int, spacing_tokens: int, n_most: int
) -> tuple[int, ...]:
    """Where a prompt is cut so that the recurrent state can be kept: ascending positions in 1 .. n_prompt-1.

    The prompt's end minus one (the same prompt again needs one row), the start of the answer, and every
    `interval_tokens`. Starts of other messages that save at least `spacing_tokens` over the one before, so also the end
    of a long system prompt, which other conversations share; of many the last `n_most`: that is what can be kept.
    """
    if n_prompt < 2:
        return ()
    starts = sorted({start for start in message_starts if 0 < start < n_prompt})
    kept = [0]
    for start in starts:
        if start - kept[-1] >= spacing_tokens:
            kept.append(start)
    cuts = {n_prompt - 1, *range(interval_tokens, n_prompt, interval_tokens), *starts[-1:], *kept[1:][-n_most:]}
    return tuple(sorted(cuts))
