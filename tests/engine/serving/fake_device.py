"""A device that knows what every cell and state ought to hold, and a driver that runs requests through a scheduler.

A cell holds a link of a chain: a hash of the namespace and of all tokens up to its position. A row checks that every
cell it can see holds exactly its own sequence's chain, before it writes its own link. Recurrent state is the last link.
Tokens are drawn from the link, so what a request must produce is known in advance, whatever the schedule.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from app.engine.request import FinishReason, GenerateRequest
from app.engine.serving.scheduler import WHOLE_BUDGET, Scheduler
from app.engine.serving.types import Budget, Choice, Ended, OutputKind, SchedulerConfig, StateAction, Ubatch

N_VOCAB = 5
BLOCK = 64


def start_link(namespace: str) -> int:
    return sum(map(ord, namespace)) + 1


def next_link(link: int, token: int) -> int:
    return hash((link, token, 0x5EED))


def drawn(link: int, stop_every: int) -> Choice:
    """The token a row with this link gives; one in `stop_every` ends the answer (0: none)."""
    return Choice(link % N_VOCAB, stop=stop_every > 0 and link // N_VOCAB % stop_every == 0)


def chain(namespace: str, tokens: tuple[int, ...]) -> list[int]:
    links, link = [], start_link(namespace)
    for token in tokens:
        link = next_link(link, token)
        links.append(link)
    return links


def expected(
    request: GenerateRequest, namespace: str, n_ctx: int, stop_every: int
) -> tuple[tuple[int, ...], FinishReason]:
    """The answer a request must get, and why it ends."""
    room = n_ctx - len(request.prompt)
    n_most = room if request.max_tokens is None else min(room, request.max_tokens)
    link = chain(namespace, request.prompt)[-1]
    answer: list[int] = []
    while len(answer) < n_most:
        choice = drawn(link, stop_every)
        answer.append(choice.token)
        if choice.stop:
            return tuple(answer), FinishReason.STOP
        link = next_link(link, choice.token)
    return tuple(answer), FinishReason.LENGTH


@dataclass
class Asked:
    """One request and what has come of it."""

    request: GenerateRequest
    namespace: str
    tokens: list[int]
    links: list[int]
    scored: dict[int, int] = field(default_factory=dict)
    ended: Ended | None = None

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt) :])

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.links.append(next_link(self.links[-1], token))


class FakeDevice:
    """Runs ubatches at once, in order; that is what a lane's user sees."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cells: list[int | None] = [None] * config.n_cells
        self.states: list[int | None] = [None] * (config.n_slots + 1)
        self.snapshots: dict[int, int | None] = {}
        self.next_id: int | None = None

    def run(self, ubatch: Ubatch, asked: dict[str, Asked]) -> dict[int, int]:
        """Check and execute; returns the link of each output row."""
        assert self.next_id in (None, ubatch.id), "ubatches must come in order"
        self.next_id = ubatch.id + 1
        for copy in ubatch.copies:
            self._copy(copy.source_cell, copy.target_cell, copy.n_cells)
        for op in ubatch.before:
            self._move_state(op.action, op.slot, op.snapshot)
        links: dict[int, int] = {}
        for s in ubatch.sequences:
            links |= self._run_sequence(ubatch, s, asked[s.request_id])
        written = [c for c in ubatch.cells.tolist() if c != self.config.scratch_cell]
        assert len(set(written)) == len(written), "two rows write the same cell"
        for op in ubatch.after:
            self._move_state(op.action, op.slot, op.snapshot)
        assert [o.row for o in ubatch.outputs] == sorted({o.row for o in ubatch.outputs})
        return {o.row: links[o.row] for o in ubatch.outputs}

    def _run_sequence(self, ubatch: Ubatch, s, asked: Asked) -> dict[int, int]:
        start, end = s.first_position, s.first_position + s.n_rows
        rows = slice(s.first_row, s.first_row + s.n_rows)
        assert ubatch.positions[rows].tolist() == list(range(start, end))
        if ubatch.follows is None:
            assert ubatch.tokens[rows].tolist() == asked.tokens[start:end]
        else:
            assert ubatch.tokens[rows].tolist() == [0]
            if asked.ended is not None:  # its zero is computed with, whatever that may lead to
                self.cells[int(ubatch.cells[s.first_row])] = next_link(0, 0)
                return {s.first_row: next_link(0, 0)}
        assert set(ubatch.slots[rows].tolist()) == {s.slot}
        assert 0 <= s.slot < self.config.n_slots
        blocks = s.blocks.tolist()
        assert blocks == sorted(set(blocks)) and 0 <= blocks[0] and blocks[-1] < self.config.n_blocks
        place = [BLOCK * blocks[p // BLOCK] + p % BLOCK for p in range(end)]
        assert max(place) < ubatch.n_kv
        seen = [self.cells[c] for c in place[:start]]
        assert seen == asked.links[:start], f"{s.request_id} sees foreign KV below {start}"
        for position, cell in zip(range(start, end), ubatch.cells[rows].tolist(), strict=True):
            if self.config.recurrent:
                before = asked.links[position - 1] if position else start_link("")
                assert self.states[s.slot] == before, f"{s.request_id} has the state of another position at {position}"
                self.states[s.slot] = asked.links[position]
            if cell == self.config.scratch_cell:
                assert self.config.recurrent
                assert self.cells[place[position]] == asked.links[position]
            else:
                assert cell == place[position]
                self.cells[cell] = asked.links[position]
        return dict(zip(range(rows.start, rows.stop), asked.links[start:end], strict=True))

    def _copy(self, source: int, target: int, n: int) -> None:
        assert n > 0 and abs(source - target) >= n, "regions overlap"
        assert max(source, target) + n <= self.config.n_blocks * BLOCK
        self.cells[target : target + n] = self.cells[source : source + n]

    def _move_state(self, action: StateAction, slot: int, snapshot: int) -> None:
        assert self.config.recurrent and 0 <= slot < self.config.n_slots
        assert action is StateAction.CLEAR or 0 <= snapshot < self.config.n_snapshots
        if action is StateAction.CLEAR:
            self.states[slot] = start_link("")
        elif action is StateAction.RESTORE:
            self.states[slot] = self.snapshots[snapshot]
        else:
            self.snapshots[snapshot] = self.states[slot]


@dataclass
class InFlight:
    """A ubatch that was handed out, and what it has led to; None while its tokens are not drawn."""

    ubatch: Ubatch
    links: dict[int, int] | None = None


class Driver:
    """A step loop without threads: several ubatches may be in flight; every answer is checked when it ends.

    `goes_ahead`: where there is nothing else to do, steps are submitted before their tokens are drawn.
    """

    def __init__(self, config: SchedulerConfig, *, stop_every: int = 0, goes_ahead: bool = False) -> None:
        self.config = config
        self.stop_every = stop_every
        self.goes_ahead = goes_ahead
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config)
        self.asked: dict[str, Asked] = {}
        self.in_flight: deque[InFlight] = deque()
        self.now = 0.0
        self.n_rows = 0

    @property
    def cache(self):
        return self.scheduler.roster.cache

    def add(self, prompt: tuple[int, ...], *, namespace: str = "", **fields) -> Asked:
        request = GenerateRequest(id=f"r{len(self.asked)}", prompt=prompt, **fields)
        self.scheduler.add(request, self.now, namespace=namespace)
        asked = Asked(request, namespace, list(prompt), chain(namespace, prompt))
        self.asked[request.id] = asked
        return asked

    def schedule(self, budget: Budget = WHOLE_BUDGET) -> Ubatch | None:
        self.now += 1.0
        ubatch = self.scheduler.schedule(self.now, budget)
        if ubatch is not None:
            assert 0 < ubatch.n_tokens <= self.config.n_ubatch
            assert len(ubatch.outputs) <= (self.config.max_outputs or self.config.n_ubatch)
            if self.config.equal_lengths:
                assert len({s.n_rows for s in ubatch.sequences}) == 1
            self._submit(ubatch)
        return ubatch

    def go_ahead(self) -> list[Ubatch]:
        """One more step of all that is in flight, as far as that is possible."""
        found = [self.scheduler.schedule_ahead(flight.ubatch) for flight in self.in_flight]
        ubatches = [ubatch for ubatch in found if ubatch is not None]
        for ubatch in ubatches:
            assert ubatch.follows in {flight.ubatch.id for flight in self.in_flight}
            self._submit(ubatch)
        return ubatches

    def _submit(self, ubatch: Ubatch) -> None:
        self.n_rows += ubatch.n_tokens
        self.in_flight.append(InFlight(ubatch))
        self._run()

    def _run(self) -> None:
        """The lane: in order, up to a ubatch whose tokens are not there."""
        undrawn = {flight.ubatch.id for flight in self.in_flight}
        for flight in self.in_flight:
            if flight.links is None:
                if flight.ubatch.follows in undrawn:
                    return
                flight.links = self.device.run(flight.ubatch, self.asked)

    def commit(self) -> tuple[Ended, ...]:
        """Take in the oldest ubatch in flight."""
        flight = self.in_flight.popleft()
        ubatch, links = flight.ubatch, flight.links
        assert links is not None
        choices = {}
        for output in ubatch.outputs:
            asked = self.asked[output.request_id]
            if output.kind is OutputKind.PROMPT_LOGPROB:
                assert output.target == asked.request.prompt[output.position]
                assert output.position not in asked.scored, "scored twice"
                asked.scored[output.position] = output.target
        for output in self.scheduler.live_samples(ubatch):
            asked = self.asked[output.request_id]
            assert output.position == len(asked.tokens), "a token was drawn twice, or one was left out"
            choices[output.request_id] = drawn(links[output.row], self.stop_every)
            asked.append(choices[output.request_id].token)
        ended = self.scheduler.commit(ubatch, choices, self.now)
        for one in ended:
            self.finish(one)
        self._run()
        return ended

    def finish(self, ended: Ended) -> None:
        asked = self.asked[ended.request_id]
        assert asked.ended is None
        asked.ended = ended
        answer, reason = expected(asked.request, asked.namespace, self.config.n_ctx, self.stop_every)
        assert ended.report.completion_tokens == len(asked.answer)
        assert 0 <= ended.report.cached_tokens < len(asked.request.prompt)
        if ended.reason is FinishReason.ABORT:
            assert asked.answer == answer[: len(asked.answer)]
            return
        assert (asked.answer, ended.reason) == (answer, reason)
        assert ended.report.processed_tokens == ended.report.prompt_tokens == len(asked.request.prompt)
        if asked.request.prompt_logprobs:
            assert sorted(asked.scored) == list(range(1, len(asked.request.prompt)))

    def abort(self, request_id: str) -> bool:
        ended = self.scheduler.abort(request_id)
        if ended is not None:
            self.finish(ended)
        return ended is not None

    def lose_device(self) -> None:
        """Everything on the device is gone, also what is in flight."""
        self.scheduler.invalidate_cache()
        stale = self.in_flight.copy()
        self.in_flight.clear()
        self.device = FakeDevice(self.config)
        for flight in stale:
            assert self.scheduler.commit(flight.ubatch, {}, self.now) == ()

    def step(self, n_in_flight: int = 1, budget: Budget = WHOLE_BUDGET) -> Ubatch | None:
        """Submit one ubatch if there is one, and commit what is too much in flight (or all, when there is none)."""
        ubatch = self.schedule(budget)
        if ubatch is None and self.goes_ahead and len(self.in_flight) < 2 * n_in_flight:
            self.go_ahead()
        while self.in_flight and (ubatch is None or len(self.in_flight) >= n_in_flight):
            self.commit()
            if ubatch is None:
                break
        return ubatch

    def drain(self, n_in_flight: int = 1, budget: Budget = WHOLE_BUDGET) -> None:
        """Run until everybody has an answer. Stalls are an error."""
        while not self.scheduler.is_idle:
            had_flights = bool(self.in_flight)
            ubatch = self.step(n_in_flight, budget)
            assert ubatch is not None or had_flights, "requests are left, but nothing can be computed"
        self.scheduler.check_integrity()
        assert self.cache.pool.n_held == 0
        assert self.scheduler.roster.slots.n_free == self.config.n_slots
