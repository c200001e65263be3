"""What the next ubatch computes: decode steps first, then chunks of prompts, within limits and memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.engine.serving.fair import share_rows
from app.engine.serving.roster import Roster, arrival
from app.engine.serving.sequence import Phase, Sequence, shared_prefix
from app.engine.serving.types import Budget, SchedulerConfig, blocks_for


@dataclass(slots=True)
class Plan:
    """Rows by sequence for the ubatch being formed, in the order in which they will stand in it."""

    n_left: int
    n_outputs_left: int
    rows: dict[Sequence, int] = field(default_factory=dict)

    def put(self, sequence: Sequence, n_rows: int) -> None:
        self.drop(sequence)
        self.rows[sequence] = n_rows
        self.n_left -= n_rows
        self.n_outputs_left -= n_outputs(sequence, n_rows)

    def drop(self, sequence: Sequence) -> None:
        n_rows = self.rows.pop(sequence, 0)
        self.n_left += n_rows
        self.n_outputs_left += n_outputs(sequence, n_rows)


class Planner:
    """Forms plans over a roster; admits and preempts on the way, so that a finished plan's blocks are reserved."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self.config = config
        self.roster = roster
        self._prompts_starved = False
        self._last_was_decode = False
        self._n_turns = 0
        self._pooled = False  # whether the ubatch being formed, or formed last, is one of hidden states

    def form(self, budget: Budget) -> Plan:
        """The next ubatch's rows; empty when there is nothing to compute now.

        Requests that want hidden states and those that want logits never share a ubatch; they take turns.
        """
        plan = self._form(budget, pooled=self._pooled_next())
        if not plan.rows:
            plan = self._form(budget, pooled=not self._pooled)
        return plan

    def _pooled_next(self) -> bool:
        return not self._pooled and any(s.is_pooled for s in (*self.roster.running, *self.roster.waiting))

    def _form(self, budget: Budget, *, pooled: bool) -> Plan:
        self._pooled = pooled
        n_rows = _least(self.config.n_ubatch, budget.n_tokens)
        plan = Plan(n_rows, self.config.max_outputs or n_rows)
        n_decode = 0 if pooled else _least(n_rows, budget.n_decode)
        n_prompt = _least(n_rows, budget.n_prompt)
        if self.config.equal_lengths:
            self._plan_equal(plan, n_decode, n_prompt)
        else:
            self._plan_mixed(plan, n_decode, n_prompt)
        return plan

    def _plan_mixed(self, plan: Plan, n_decode: int, n_prompt: int) -> None:
        """Decode first, prompts take what is left; where decode alone fills ubatches, they get half of every other."""
        if self._prompts_starved and n_prompt > 0:
            self._prompts_starved = False
            self._add_prompts(plan, min(n_prompt, -(-plan.n_left // 2)))
            self._add_decodes(plan, n_decode)
            return
        self._add_decodes(plan, n_decode)
        self._prompts_starved = plan.n_left == 0
        self._add_prompts(plan, n_prompt)

    def _plan_equal(self, plan: Plan, n_decode: int, n_prompt: int) -> None:
        """One kind per ubatch, taking turns when there are both; every sequence gets the same number of rows."""
        kinds = [(self._add_decodes, n_decode, True), (self._add_equal_prompts, n_prompt, False)]
        for add_rows, n_rows, is_decode in reversed(kinds) if self._last_was_decode else kinds:
            add_rows(plan, n_rows)
            if plan.rows:
                self._last_was_decode = is_decode
                return

    def _add_decodes(self, plan: Plan, n_rows: int) -> None:
        """One row for each sequence that waits for its next token, those that waited longest first."""
        ready = [s for s in self.roster.running if s.is_decoding and s not in plan.rows]
        for sequence in sorted(ready, key=lambda s: s.last_ubatch):
            if n_rows <= 0 or plan.n_left <= 0 or plan.n_outputs_left <= 0:
                return
            if sequence.phase is Phase.RUNNING and self._reserve(sequence, 1, plan):
                plan.rows[sequence] = 1
                plan.n_left -= 1
                plan.n_outputs_left -= 1
                n_rows -= 1

    def _add_prompts(self, plan: Plan, n_rows: int) -> None:
        n_rows = min(n_rows, plan.n_left)
        if n_rows <= 0:
            return
        candidates = self._prompt_candidates()
        shares = share_rows([_n_to_do(s) for s in candidates], n_rows)
        for sequence, share in zip(candidates, shares, strict=True):
            n_rows -= self._raise(plan, sequence, min(share, n_rows))
        for sequence in candidates:  # what snapshots' cuts, a better match or those without memory left over
            if sequence.phase is Phase.RUNNING:
                n_rows -= self._raise(plan, sequence, plan.rows.get(sequence, 0) + n_rows)

    def _add_equal_prompts(self, plan: Plan, n_rows: int) -> None:
        """A leader's chunk, and as long chunks of others. Leading takes turns: the shortest, the oldest, ..."""
        n_rows = min(n_rows, plan.n_left)
        if n_rows <= 0:
            return
        self._n_turns += 1
        candidates = self._prompt_candidates()
        order = sorted(candidates, key=_n_to_do) if self._n_turns % 2 else candidates
        length = 0
        for sequence in order:
            if length == 0:
                length = self._raise(plan, sequence, n_rows)
            elif sum(plan.rows.values()) + length <= n_rows and _n_to_do(sequence) >= length:
                if self._raise(plan, sequence, length) < length:  # cut short: another time
                    plan.drop(sequence)

    def _raise(self, plan: Plan, sequence: Sequence, n_rows: int) -> int:
        """Give a prompt up to `n_rows` rows in all, admitting it first if it waits; returns how many more it got."""
        n_had = plan.rows.get(sequence, 0)
        n_spare = plan.n_outputs_left + n_outputs(sequence, n_had)
        if n_rows <= n_had or n_spare <= 0:
            return 0
        if sequence.phase is Phase.WAITING and not self.roster.admit(sequence):
            return 0
        n_rows = _fit_outputs(sequence, sequence.chunk(n_rows), n_spare)
        if n_rows <= n_had or not self._reserve(sequence, n_rows, plan):
            return 0
        plan.put(sequence, n_rows)
        return n_rows - n_had

    def _prompt_candidates(self) -> list[Sequence]:
        """Prompts in work, and as many waiting ones as there are free slots, by arrival."""
        ahead = [s for s in self.roster.running if s.n_left > 0 and not s.is_decoding and s.is_pooled == self._pooled]
        n_free = self.roster.slots.n_free
        for sequence in self.roster.waiting:
            if n_free == 0:
                break
            if sequence.is_pooled != self._pooled:
                continue
            if sequence.n_left == 0:  # preempted while its token was being computed
                continue
            if sequence.n_matched < 0:
                match = self.roster.cache.match(sequence)
                sequence.n_matched = 0 if match is None else match.n_tokens
            if not self._is_held(sequence, ahead):
                n_free -= 1
                ahead.append(sequence)
        return sorted(ahead, key=arrival)

    def _is_held(self, sequence: Sequence, ahead: list[Sequence]) -> bool:
        """Whether another prompt in work is about to compute what this one could share."""
        return sequence.is_caching and any(
            self._n_to_gain(sequence, other) >= self.config.hold_tokens
            for other in ahead
            if _may_share(sequence, other)
        )

    def _n_to_gain(self, sequence: Sequence, other: Sequence) -> int:
        """Tokens the other will publish that this one needs and the cache has not yet."""
        shared = sequence.shared.get(other.arrival)
        if shared is None:
            shared = sequence.shared[other.arrival] = shared_prefix(sequence.tokens, other.tokens)
        shared = min(shared, sequence.match_limit)
        if self.config.recurrent:
            shared = max((cut for cut in other.cuts if cut <= shared), default=0)
        return shared - max(other.n_scheduled, other.n_matched, sequence.n_matched)

    def _reserve(self, sequence: Sequence, n_rows: int, plan: Plan) -> bool:
        """Blocks for the next rows; younger requests make room if they must. False: it has to wait itself."""
        n_tokens = sequence.n_scheduled + n_rows
        if blocks_for(n_tokens) <= len(sequence.blocks):
            return True
        while True:
            youngest = self.roster.running[-1]
            can_preempt = youngest.arrival > sequence.arrival
            if self.roster.cache.reserve(sequence, n_tokens, last_resort=not can_preempt):
                return True
            if not can_preempt:
                return False
            plan.drop(youngest)
            self.roster.preempt(youngest)


def n_outputs(sequence: Sequence, n_rows: int) -> int:
    """Rows that need logits in a chunk of `n_rows` from where the sequence stands."""
    end = sequence.n_scheduled + n_rows
    n = int(n_rows > 0 and end == sequence.n_known and sequence.wants_sample)
    if sequence.request.prompt_logprobs:
        n += max(0, min(end, sequence.n_prompt - 1) - max(sequence.n_scheduled, sequence.n_scored))
    return n


def _fit_outputs(sequence: Sequence, n_rows: int, n_most: int) -> int:
    """The longest chunk up to `n_rows` with at most `n_most` outputs."""
    while n_rows > 0 and n_outputs(sequence, n_rows) > n_most:
        n_rows -= n_outputs(sequence, n_rows) - n_most
    return n_rows


def _least(limit: int, wanted: int | None) -> int:
    return limit if wanted is None else max(0, min(limit, wanted))


def _may_share(sequence: Sequence, other: Sequence) -> bool:
    """Whether what the other computes will be in the tree for this one."""
    is_detached = other.tail is not None and not other.tail.is_attached
    return other.is_caching and other.namespace == sequence.namespace and not is_detached


def _n_to_do(sequence: Sequence) -> int:
    """Rows before the next token; for one that waits, as far as one can tell."""
    if sequence.phase is Phase.RUNNING:
        return sequence.n_left
    return sequence.n_known - max(0, sequence.n_matched)
