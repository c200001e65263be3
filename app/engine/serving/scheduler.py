"""Who computes what next: the only door between requests and ubatches. Pure: the caller owns the clock and the devices.

Each lane does what is submitted strictly in order, and every ubatch handed out is submitted. So whatever a sequence has
scheduled counts as done here: a later chunk of a prompt, a second request that shares it, and a new owner of a freed
block or slot all come later in every lane. Only a drawn token must be waited for, and its row may be submitted ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from app.engine.request import FinishReason, GenerateRequest
from app.engine.service import SlotInfo
from app.engine.serving.assemble import Rows, assemble, assemble_ahead
from app.engine.serving.planner import Plan, Planner
from app.engine.serving.roster import Roster
from app.engine.serving.sequence import Phase, Sequence, snapshot_cuts
from app.engine.serving.types import (
    Budget,
    Choice,
    CopyCells,
    Counters,
    Demand,
    Ended,
    Output,
    OutputKind,
    Report,
    SchedulerConfig,
    StateOp,
    Ubatch,
)
from app.errors import ContextLengthExceeded, InternalError, QueueFull

#: A `schedule` call without limits of its own.
WHOLE_BUDGET = Budget()


@dataclass(frozen=True, slots=True)
class _Flight:
    """One sequence's part of a submitted ubatch: what its commit will mean."""

    sequence: Sequence
    end: int
    n_scored: int
    has_sample: bool


class Scheduler:
    """Continuous batching over one pool of KV blocks.

    The step loop: `add` and `abort` what callers asked for; `expire(now)`; while few enough ubatches are in flight,
    `schedule(now)` and submit what comes to the lanes; when a ubatch's logits are there, draw a token for each of
    `live_samples(ubatch)` and `commit` them, in order of ubatch id.

    Not thread-safe; one thread owns it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.totals = Counters()
        self.roster = Roster(config)
        self._planner = Planner(config, self.roster)
        self._in_flight: dict[int, list[_Flight]] = {}  # by ubatch id, ascending
        self._n_arrivals = 0
        self._n_ubatches = 0
        self._epoch = 0
        self._service_s = 1.0  # how long a request holds its slot, averaged

    @property
    def n_waiting(self) -> int:
        return len(self.roster.waiting)

    @property
    def n_running(self) -> int:
        return len(self.roster.running)

    @property
    def n_in_flight(self) -> int:
        """Ubatches handed out and not committed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """No request is here and nothing is in flight."""
        return not self.roster.live and not self._in_flight

    def add(self, request: GenerateRequest, now: float, *, namespace: str = "") -> None:
        """Put a request into the queue. `namespace`: whatever else than tokens changes the KV (adapters, images).

        Raises QueueFull (with a guess when to try again) or ContextLengthExceeded.
        """
        n_prompt = len(request.prompt)
        if n_prompt == 0 or request.id in self.roster.live:
            raise InternalError(f"request {request.id!r} has an empty prompt, or is here already")
        if n_prompt >= self.config.n_ctx:
            self.totals.rejected += 1
            raise ContextLengthExceeded(n_prompt, self.config.n_ctx)
        if len(self.roster.live) >= self.config.n_slots + self.config.max_queue:
            self.totals.rejected += 1
            raise QueueFull(
                f"{len(self.roster.live)} requests are running or waiting, which is all this server takes; try later",
                retry_after_s=min(60.0, max(1.0, self._service_s * (1 + self.n_waiting) / self.config.n_slots)),
            )
        self.roster.add(self._sequence(request, now, namespace))
        self.totals.requests += 1

    def abort(self, request_id: str) -> Ended | None:
        """Forget a request at any moment, also with rows of it in flight. None when it is not known (any more)."""
        sequence = self.roster.live.get(request_id)
        return None if sequence is None else self._end(sequence, FinishReason.ABORT)

    def expire(self, now: float) -> tuple[Ended, ...]:
        """Abort every request whose deadline has passed."""
        late = [s for s in self.roster.live.values() if s.is_late(now)]
        return tuple(self._end(sequence, FinishReason.ABORT) for sequence in late)

    def schedule(self, now: float, budget: Budget = WHOLE_BUDGET) -> Ubatch | None:
        """Form the next ubatch, or None when nothing can be computed before the next commit or add."""
        plan = self._planner.form(budget)
        return self._emit(plan, now) if plan.rows else None

    def schedule_ahead(self, ubatch: Ubatch) -> Ubatch | None:
        """One more step of the sequences that a ubatch in flight decodes, before their tokens are drawn.

        Those that will end for certain are left out, and those for whom others would have to make room. None where
        there is nobody left, or where state that cannot rewind would be moved on by a step that turns out to be none.
        """
        if self.config.recurrent or self.config.equal_lengths:
            return None
        flights = self._in_flight.get(ubatch.id, ())
        sequences = [f.sequence for f in flights if f.has_sample and self._may_go_ahead(f.sequence)]
        if not sequences:
            return None
        ubatch_id, rows = self._n_ubatches, assemble_ahead(sequences, self.roster.cache.pool.generation)
        for sequence in sequences:
            sequence.is_ahead = True
            sequence.last_ubatch = ubatch_id
        self._in_flight[ubatch_id] = [_Flight(s, s.n_known + 1, s.n_scored, has_sample=True) for s in sequences]
        return self._ubatch(rows, (self.roster.cache.pool.take_copies(), ()), follows=ubatch.id)

    def _may_go_ahead(self, sequence: Sequence) -> bool:
        """Whether one more row of it can be submitted already; its block is reserved then."""
        is_over = sequence.phase is not Phase.RUNNING or sequence.n_new + 1 >= sequence.max_new
        if is_over or sequence.is_ahead or not sequence.is_sampling:
            return False
        return self.roster.cache.reserve(sequence, sequence.n_known + 1, last_resort=False)

    def demand(self) -> Demand:
        """What budgets are chosen by. Waiting requests count as far as the cache is known not to have them."""
        n_decoding = n_ready = 0
        prompts = []
        for sequence in self.roster.live.values():
            n_known = len(sequence.tokens)
            n_past = max(0, sequence.n_matched)
            if sequence.phase is Phase.RUNNING:
                n_past = n_known if sequence.is_sampling else sequence.n_scheduled
                if n_known > sequence.n_prompt and n_known - n_past <= 1:
                    n_decoding += 1
                    n_ready += n_known - n_past
                    continue
            if n_known > n_past:
                prompts.append((n_known - n_past, n_past))
        return Demand(tuple(prompts), n_decoding, n_ready)

    def live_samples(self, ubatch: Ubatch) -> tuple[Output, ...]:
        """The SAMPLE outputs of a ubatch in flight whose requests still want a token."""
        flights = self._in_flight.get(ubatch.id, ())
        wanted = {f.sequence.id for f in flights if f.has_sample and f.sequence.phase is not Phase.ENDED}
        return tuple(o for o in ubatch.outputs if o.kind is OutputKind.SAMPLE and o.request_id in wanted)

    def commit(self, ubatch: Ubatch, choices: Mapping[str, Choice], now: float) -> tuple[Ended, ...]:
        """Take in a ubatch that has run: a choice for each of `live_samples(ubatch)`; others are ignored.

        Returns the requests that are over now. Ubatches of an earlier epoch (see `invalidate_cache`) are ignored.
        """
        if ubatch.epoch != self._epoch:
            return ()
        if next(iter(self._in_flight), None) != ubatch.id:
            raise InternalError(f"ubatch {ubatch.id} was committed, but {list(self._in_flight)} are in flight")
        ended = []
        for flight in self._in_flight.pop(ubatch.id):
            if flight.sequence.phase is not Phase.ENDED:
                reason = self._settle(flight, choices)
                if reason is not None:
                    ended.append(self._end(flight.sequence, reason, now))
        return tuple(ended)

    def invalidate_cache(self) -> None:
        """Everything on the devices is lost: forget KV, snapshots and ubatches in flight.

        Running requests go back to the queue and are recomputed from their tokens, drawn ones included.
        """
        self._epoch += 1
        self._in_flight.clear()
        self.roster.lose_memory()

    def fail_all(self) -> tuple[Report, ...]:
        """End every request without an answer (the caller tells them why) and forget the cache as above."""
        reports = tuple(sequence.report() for sequence in self.roster.live.values())
        for sequence in self.roster.live.values():
            sequence.phase = Phase.ENDED
        self.roster.live.clear()
        self.invalidate_cache()
        return reports

    def report(self, request_id: str) -> Report | None:
        """Where a live request stands; None when it is not known (any more)."""
        sequence = self.roster.live.get(request_id)
        return None if sequence is None else sequence.report()

    def slots(self) -> list[SlotInfo]:
        """One entry per slot, in order."""
        return [_slot_info(slot, self.roster.slots.owner(slot)) for slot in range(self.config.n_slots)]

    def counters(self) -> dict[str, float]:
        """Totals since the start, and gauges, by name."""
        pool, totals = self.roster.cache.pool, self.totals
        return {
            "requests_total": totals.requests,
            "requests_rejected_total": totals.rejected,
            **{f"requests_{reason}_total": totals.ended.get(reason, 0) for reason in FinishReason},
            "preemptions_total": self.roster.n_preemptions,
            "ubatches_total": self._n_ubatches,
            "decode_rows_total": totals.decode_rows,
            "prompt_rows_total": totals.prompt_rows,
            "prompt_tokens_total": totals.prompt_tokens,
            "cached_tokens_total": totals.cached_tokens,
            "blocks_allocated_total": pool.n_allocated,
            "blocks_moved_total": pool.n_moved,
            "requests_running": self.n_running,
            "requests_waiting": self.n_waiting,
            "ubatches_in_flight": self.n_in_flight,
            "blocks": pool.n_blocks,
            "blocks_free": pool.n_free,
            "blocks_held": pool.n_held,
            "blocks_cached": pool.n_evictable,
            "snapshots": len(self.roster.cache.snapshots),
        }

    def check_integrity(self) -> None:
        """Verify every invariant of slots, blocks, tree and snapshots; raises InternalError naming what is wrong."""
        self.roster.check_integrity()
        in_flight = {f.sequence for flights in self._in_flight.values() for f in flights if f.has_sample}
        if {s for s in self.roster.live.values() if s.is_sampling} != {
            s for s in in_flight if s.phase is not Phase.ENDED
        }:
            raise InternalError("the requests that await a token are not those with a sample in flight")

    def _sequence(self, request: GenerateRequest, now: float, namespace: str) -> Sequence:
        config, n_prompt = self.config, len(request.prompt)
        room = config.n_ctx - n_prompt
        is_caching = config.cache_prompts and request.cache_prompt
        cuts: tuple[int, ...] = ()
        if is_caching and config.n_snapshots:
            cuts = snapshot_cuts(
                n_prompt,
                request.message_starts,
                interval_tokens=config.snapshot_interval_tokens,
                spacing_tokens=config.snapshot_spacing_tokens,
                n_most=config.n_snapshots,
            )
        self._n_arrivals += 1
        return Sequence(
            request=request,
            namespace=namespace,
            arrival=self._n_arrivals,
            added_s=now,
            max_new=room if request.max_tokens is None else min(room, request.max_tokens),
            is_caching=is_caching,
            tokens=list(request.prompt),
            n_prompt=n_prompt,
            cuts=cuts,
        )

    def _end(self, sequence: Sequence, reason: FinishReason, now: float | None = None) -> Ended:
        report = sequence.report()
        self.roster.remove(sequence)
        self.totals.ended[reason] = self.totals.ended.get(reason, 0) + 1
        if now is not None and sequence.started_s is not None:
            self._service_s += 0.1 * (now - sequence.started_s - self._service_s)
        return Ended(sequence.id, reason, report)

    def _settle(self, flight: _Flight, choices: Mapping[str, Choice]) -> FinishReason | None:
        """Take in one sequence's part of a ubatch that has run; says why it is over, if it is."""
        sequence = flight.sequence
        sequence.n_processed = max(sequence.n_processed, min(flight.end, sequence.n_prompt))
        sequence.n_scored_done = max(sequence.n_scored_done, flight.n_scored)
        if not flight.has_sample:
            is_done = flight.end >= sequence.n_prompt and not sequence.wants_sample
            return FinishReason.LENGTH if is_done else None
        choice = choices.get(sequence.id)
        if choice is None:
            raise InternalError(f"no token was drawn for request {sequence.id}")
        sequence.tokens.append(choice.token)
        sequence.is_sampling, sequence.is_ahead = sequence.is_ahead, False
        if choice.stop:
            return FinishReason.STOP
        if sequence.is_sampling and sequence.phase is Phase.RUNNING:  # what went ahead is now as if scheduled just so
            self.roster.cache.advance(sequence, 1)
        return FinishReason.LENGTH if sequence.n_new >= sequence.max_new else None

    def _emit(self, plan: Plan, now: float) -> Ubatch:
        cache = self.roster.cache
        started = self._note_started(plan, now)
        rows = assemble(plan.rows.items(), cache.pool.generation, self.config.scratch_cell)
        moves = cache.pool.take_copies(), cache.take_before()
        self._in_flight[self._n_ubatches], after = self._advance(plan, self._n_ubatches)
        return self._ubatch(rows, moves, after, started)

    def _ubatch(
        self,
        rows: Rows,
        moves: tuple[tuple[CopyCells, ...], tuple[StateOp, ...]],
        after: tuple[StateOp, ...] = (),
        started: tuple[str, ...] = (),
        follows: int | None = None,
    ) -> Ubatch:
        """The next ubatch; `moves` are copies of cells and moves of state before it."""
        copies, before = moves
        ubatch = Ubatch(
            id=self._n_ubatches,
            epoch=self._epoch,
            tokens=np.array(rows.tokens, dtype=np.int32),
            positions=np.array(rows.positions, dtype=np.int32),
            cells=np.array(rows.cells, dtype=np.int64),
            slots=np.array(rows.slots, dtype=np.int32),
            sequences=tuple(rows.sequences),
            outputs=tuple(rows.outputs),
            copies=copies,
            before=before,
            after=after,
            started=started,
            follows=follows,
        )
        self._n_ubatches += 1
        self.totals.decode_rows += ubatch.n_decode
        self.totals.prompt_rows += ubatch.n_tokens - ubatch.n_decode
        return ubatch

    def _note_started(self, plan: Plan, now: float) -> tuple[str, ...]:
        """The planned requests that compute for the first time; what they found in the cache is theirs to report."""
        first = [s for s in plan.rows if s.n_cached is None]
        for sequence in first:
            sequence.started_s = now
            sequence.n_cached = sequence.n_processed = sequence.n_scheduled
            self.totals.cached_tokens += sequence.n_cached
            self.totals.prompt_tokens += sequence.n_prompt
        return tuple(s.id for s in first)

    def _advance(self, plan: Plan, ubatch_id: int) -> tuple[list[_Flight], tuple[StateOp, ...]]:
        """Count the plan's rows as submitted; returns what to settle at commit, and snapshots to take after the run."""
        flights, after = [], []
        for sequence, n_rows in plan.rows.items():
            end = sequence.n_scheduled + n_rows
            sequence.is_sampling = end == sequence.n_known and sequence.wants_sample
            if sequence.request.prompt_logprobs:
                sequence.n_scored = max(sequence.n_scored, min(end, sequence.n_prompt - 1))
            sequence.last_ubatch = ubatch_id
            take = self.roster.cache.advance(sequence, n_rows)
            if take is not None:
                after.append(take)
            flights.append(_Flight(sequence, end, sequence.n_scored, sequence.is_sampling))
        return flights, tuple(after)


def _slot_info(slot: int, sequence: Sequence | None) -> SlotInfo:
    if sequence is None:
        return SlotInfo(id=slot, busy=False, request_id=None, n_prompt=0, n_cached=0, n_processed=0, n_decoded=0)
    return SlotInfo(
        id=slot,
        busy=True,
        request_id=sequence.id,
        n_prompt=sequence.n_prompt,
        n_cached=sequence.n_cached or 0,
        n_processed=sequence.n_processed,
        n_decoded=sequence.n_new,
    )
