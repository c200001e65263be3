"""How ubatches overlap: how many are in flight and how large they are, by the times they were seen to take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.executor import Running
from app.engine.pacing import Pacing, least_in_flight
from app.engine.serving.types import Budget, Demand, Ubatch
from app.engine.trace import Timeline, Trace, TracedUbatch, UbatchMarks

#: So many ubatches are learned from together where no decision asks for it before: on caches that computing has emptied
#: one takes as long as several.
LEARNED_TOGETHER = 32

#: Decode steps that take longer are not submitted ahead of their tokens. What that spares is some tenths of a
#: millisecond each; what it costs is a step in vain at the end of every answer, behind which new prompts wait.
AHEAD_BELOW_S = 0.025


@dataclass(frozen=True, slots=True)
class _Noted:
    """A ubatch that has run, without what it left: rows are large."""

    ubatch: Ubatch
    marks: UbatchMarks
    taken_s: float
    prepares: bool


class Overlap:
    """Decides before a ubatch and learns after it. Used by the engine's thread alone."""

    def __init__(self, sizes: Sequence[int], n_at_least: int, trace: Trace | None) -> None:
        """`n_at_least`: ubatches that may be in flight in any case, as far as there are any."""
        self._pacing = Pacing(sizes)
        self._timeline = Timeline()
        self._n_at_least = n_at_least
        self._trace = trace
        self._unlearned: deque[_Noted] = deque()
        self._step_s = math.inf  # what the latest decode step took, on its whole way

    def has_room(self, n_stages: int, running: Sequence[Running]) -> bool:
        """Whether one more ubatch may be in flight: as many as keep all stages busy, limited by memory too."""
        n = len(running)
        if n < self._n_at_least or n_stages == 1 or not running:
            return n < self._n_at_least
        if n < least_in_flight(n_stages):
            return True
        last = running[-1].ubatch
        return n < self._learned().n_in_flight(n_stages, last.n_tokens, last.n_visible)

    def budget(self, n_stages: int, demand: Demand, running: Sequence[Running]) -> Budget:
        """How long the next prompt chunk is, and how many sequences a decode group has: all over one stage."""
        n_prompt = n_decode = None
        n_groups = self._n_groups(n_stages, demand)
        if demand.n_prompt_tokens:
            in_flight = [(one.ubatch.n_tokens, float(one.ubatch.n_visible)) for one in running]
            n_prompt = self._learned().prompt_chunk(n_stages, demand.prompts, in_flight)
            if demand.n_decoding:
                n_prompt = self._chunk_beside(n_stages, demand, running, n_prompt)
        if demand.n_decoding > 1:
            n_decode = -(-demand.n_decoding // n_groups)
            if not demand.n_prompt_tokens and len(running) >= n_groups:
                n_decode = 0  # who is ready now waits for the next group, or there would be ever more and smaller ones
        return Budget(n_prompt=n_prompt, n_decode=n_decode)

    def goes_ahead(self, n_stages: int, demand: Demand, running: Sequence[Running]) -> bool:
        """Whether the next step of the ubatch that will be taken next is to be submitted before its tokens are drawn.

        Not while somebody is ready and waits for that step, nor where groups are larger or more than they should be.
        """
        if demand.n_ready or not running or self._step_s > AHEAD_BELOW_S:
            return False
        n_groups = self._n_groups(n_stages, demand)
        is_group = 0 < len(running[0].ubatch.outputs) <= -(-demand.n_decoding // n_groups)
        return is_group and sum(bool(one.ubatch.outputs) for one in running) <= n_groups

    def _n_groups(self, n_stages: int, demand: Demand) -> int:
        return self._learned().n_groups(n_stages, demand.n_decoding) if n_stages > 1 and demand.n_decoding > 1 else 1

    def _chunk_beside(self, n_stages: int, demand: Demand, running: Sequence[Running], most: int) -> int:
        """Decode rows that are not in flight are ready; groups of them are as large as the largest there is."""
        groups = [one.ubatch.n_decode for one in running]
        n_ready = max(0, demand.n_decoding - sum(groups))
        n_now = max(1, n_ready, *groups)
        seen = [one.ubatch.n_visible / one.ubatch.n_tokens for one in running if one.ubatch.n_decode]
        row_cells = min(seen, default=0.0)  # rows of a prompt beside them may see more
        ready, now = (n_ready, n_ready * row_cells), (n_now, n_now * row_cells)
        return self._learned().chunk_beside(n_stages, demand.prompts, ready, now, most)

    def note(self, running: Running, now_s: float, n_prepared: int) -> None:
        """A ubatch has run. If programs were prepared meanwhile, `n_prepared` in all, its times say nothing.

        It is learned from as soon as a decision depends on it, or else by `learn`.
        """
        if running.ubatch.n_decode == running.ubatch.n_tokens:
            self._step_s = now_s - running.marks.submitted_s
        self._unlearned.append(_Noted(running.ubatch, running.marks, now_s, n_prepared != running.n_prepared))

    def learn(self, *, is_idle: bool) -> None:
        """Learn from what was noted if much was, or if there is nothing else to do."""
        if is_idle or len(self._unlearned) >= LEARNED_TOGETHER:
            self._learned()

    def _learned(self) -> Pacing:
        while self._unlearned:
            self._learn(self._unlearned.popleft())
        return self._pacing

    def _learn(self, noted: _Noted) -> None:
        marks, ubatch = noted.marks, noted.ubatch
        spans = self._timeline.take(marks, noted.taken_s)
        if not noted.prepares:
            n_visible = ubatch.n_visible
            for span in spans:
                self._pacing.note(span.stage, marks.n_rows, n_visible, span.busy_s, queued=span.queued)
        if self._trace is not None:
            requests = tuple(sequence.request_id for sequence in ubatch.sequences)
            n_prompt = ubatch.n_tokens - ubatch.n_decode
            traced = TracedUbatch(
                ubatch.id, ubatch.n_decode, n_prompt, requests, marks.submitted_s, noted.taken_s, spans
            )
            self._trace.add(traced)

    def counters(self) -> dict[str, float]:
        return self._timeline.counters()
