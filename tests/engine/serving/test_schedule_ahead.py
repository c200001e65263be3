"""Steps that are handed out before their tokens are drawn: who goes ahead, who does not, and what is left of it."""

from __future__ import annotations

import random

import pytest

from app.engine.request import FinishReason
from app.engine.serving.sequence import Phase
from app.engine.serving.types import Choice, SchedulerConfig, Ubatch
from app.errors import InternalError

from .fake_device import BLOCK, Asked, Driver


def driver(**fields) -> Driver:
    stop_every = fields.pop("stop_every", 0)
    sizes = {"n_slots": 4, "n_blocks": 64, "n_ctx": 2000, "n_ubatch": 64}
    return Driver(SchedulerConfig(**{**sizes, **fields}), stop_every=stop_every)


def text(n: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((i * i * 7 + (i + 1) * seed + i // 3 * seed) % 1000 for i in range(n))


def scheduled(d: Driver) -> Ubatch:
    """The next step, which there must be."""
    ubatch = d.schedule()
    assert ubatch is not None
    d.scheduler.check_integrity()
    return ubatch


def ahead(d: Driver) -> list[Ubatch]:
    found = d.go_ahead()
    d.scheduler.check_integrity()
    return found


def commit(d: Driver) -> None:
    d.commit()
    d.scheduler.check_integrity()


def names(ubatch: Ubatch) -> list[str]:
    return [s.request_id for s in ubatch.sequences]


def all_prompts(d: Driver) -> None:
    """Every prompt is read, and a first token drawn."""
    while any(not one.answer for one in d.asked.values()):
        d.step()
    d.scheduler.check_integrity()


def step(d: Driver) -> list[Ubatch]:
    """What can be computed, one step more of all that is in flight, and the oldest of it taken in."""
    d.schedule()
    found = ahead(d)
    commit(d)
    return found


def sequence_of(d: Driver, asked: Asked):
    return d.scheduler.roster.live[asked.request.id]


def test_a_step_ahead_is_the_row_that_would_have_come_next() -> None:
    """But for its token: the same positions, cells, blocks and outputs, under the next id."""
    d, plain = driver(), driver()
    for one in (d, plain):
        for seed in (1, 2, 3):
            one.add(text(10 + seed, seed), max_tokens=40)
        all_prompts(one)
    first = scheduled(d)
    scheduled(plain)
    for _ in range(30):
        (second,) = ahead(d)
        commit(plain)
        wanted = scheduled(plain)
        assert second.follows == first.id and second.n_decode == second.n_tokens == 3
        assert second.tokens.tolist() == [0] * 3 and not (second.before or second.after or second.started)
        for ours, theirs in zip(second.sequences, wanted.sequences, strict=True):
            assert ours.blocks.tolist() == theirs.blocks.tolist()
            for name in ("request_id", "slot", "first_row", "n_rows", "first_position", "is_decode"):
                assert getattr(ours, name) == getattr(theirs, name)
        for name in ("positions", "cells", "slots"):
            assert getattr(second, name).tolist() == getattr(wanted, name).tolist()
        assert second.outputs == wanted.outputs
        commit(d)
        first = second
    for one in (d, plain):
        one.drain()
        assert all(len(a.answer) == 40 for a in one.asked.values())


def test_whoever_ends_by_its_length_for_certain_stays_behind() -> None:
    d = driver()
    for n in (1, 2, 3, 4):
        d.add(text(10, n), max_tokens=n)
    prompt = scheduled(d)
    assert len(prompt.outputs) == 4
    (second,) = ahead(d)
    assert names(second) == ["r1", "r2", "r3"]
    commit(d)
    (third,) = ahead(d)
    assert third.follows == second.id and names(third) == ["r2", "r3"]
    commit(d)
    (fourth,) = ahead(d)
    assert names(fourth) == ["r3"]
    commit(d)
    assert ahead(d) == []
    commit(d)
    assert [len(one.answer) for one in d.asked.values()] == [1, 2, 3, 4]
    d.drain()


def test_the_end_of_the_context_is_certain_too() -> None:
    d = driver(n_ctx=12)
    one = d.add(text(9), max_tokens=None)
    while one.ended is None:
        step(d)
    assert len(one.answer) == 3 and d.n_rows == 9 + 2
    d.drain()


def test_nobody_goes_two_steps_ahead() -> None:
    d = driver()
    d.add(text(10), max_tokens=20)
    all_prompts(d)
    first = scheduled(d)
    (second,) = ahead(d)
    assert d.scheduler.schedule_ahead(first) is None and d.scheduler.schedule_ahead(second) is None
    assert d.scheduler.schedule(d.now) is None
    commit(d)
    (third,) = ahead(d)
    assert third.follows == second.id
    d.drain()


def test_a_ubatch_that_is_not_in_flight_leads_to_nothing() -> None:
    d = driver()
    d.add(text(10), max_tokens=20)
    all_prompts(d)
    first = scheduled(d)
    commit(d)
    assert d.scheduler.schedule_ahead(first) is None
    scheduled(d)
    lost = d.in_flight[-1].ubatch
    d.lose_device()
    assert d.scheduler.schedule_ahead(lost) is None
    d.drain()


@pytest.mark.parametrize(
    "rules",
    [{"recurrent": True}, {"equal_lengths": True}, {"recurrent": True, "equal_lengths": True}],
    ids=["recurrent", "equal lengths", "both"],
)
def test_state_that_cannot_rewind_is_never_moved_ahead(rules: dict[str, bool]) -> None:
    snapshots = {"snapshot_bytes": 1, "snapshot_budget_bytes": 4} if "recurrent" in rules else {}
    d = driver(**rules, **snapshots)
    d.add(text(10), max_tokens=20)
    all_prompts(d)
    scheduled(d)
    assert ahead(d) == []
    d.drain()


def test_parts_of_prompts_and_pooled_requests_do_not_go_ahead() -> None:
    d = driver(n_ubatch=16)
    d.add(text(40), max_tokens=20)
    scheduled(d)
    assert ahead(d) == []
    scheduled(d)
    assert ahead(d) == []
    last = scheduled(d)
    assert last.outputs
    (after,) = ahead(d)  # the prompt's last part has a token to be drawn
    assert after.follows == last.id and after.positions.tolist() == [40]
    d.drain()
    pooled = d.add(text(10, 5), max_tokens=1, pooling="last", cache_prompt=False)
    scheduled(d)
    assert ahead(d) == []
    d.drain()
    assert pooled.ended is not None


def test_of_a_mixed_ubatch_those_with_a_token_to_draw_go_ahead() -> None:
    d = driver()
    a, b = d.add(text(5, 1), max_tokens=20), d.add(text(6, 2), max_tokens=20)
    all_prompts(d)
    d.add(text(200, 3), max_tokens=20)
    mixed = scheduled(d)
    assert names(mixed)[:2] == ["r0", "r1"] and len(names(mixed)) == 3
    d.abort(a.request.id)
    (after,) = ahead(d)
    assert names(after) == [b.request.id]
    d.drain()


# --- memory ---


def test_a_new_block_is_taken_ahead_and_given_back_if_it_was_in_vain() -> None:
    d = driver()
    one = d.add(text(BLOCK - 1), max_tokens=20)
    all_prompts(d)
    scheduled(d)  # computes the last cell of the first block
    n_held = d.cache.pool.n_held
    (second,) = ahead(d)
    assert second.cells.tolist() == [int(second.sequences[0].blocks[1]) * BLOCK] and d.cache.pool.n_held == n_held + 1
    d.abort(one.request.id)
    d.scheduler.check_integrity()
    assert d.cache.pool.n_held == 0
    d.drain()


def test_nobody_is_preempted_for_a_step_ahead() -> None:
    """Where no block is free it is left out; the others go ahead, and it has its turn when its token is drawn."""
    d = driver(n_blocks=3, n_ctx=190, n_slots=2, n_ubatch=200, cache_prompts=False)
    older, younger = d.add(text(BLOCK - 3, 1), max_tokens=30), d.add(text(BLOCK - 1, 2), max_tokens=30)
    all_prompts(d)
    for _ in range(2):
        (second,) = step(d)
        assert names(second) == ["r0", "r1"]
    assert d.cache.pool.n_free == 0
    (second,) = step(d)
    assert names(second) == [younger.request.id] and d.scheduler.roster.n_preemptions == 0
    assert sequence_of(d, older).n_left == 1
    step(d)
    assert d.scheduler.roster.n_preemptions == 1 and sequence_of(d, younger).phase is Phase.WAITING
    while d.asked.keys() & d.scheduler.roster.live.keys():
        step(d)
    d.drain()
    assert len(older.answer) == len(younger.answer) == 30


def test_what_only_the_cache_holds_makes_room_for_a_step_ahead() -> None:
    d = driver(n_blocks=3, n_ctx=180, n_slots=1)
    d.add(text(2 * BLOCK - 1, 1), max_tokens=1)
    d.drain()
    one = d.add(text(BLOCK - 1, 2), max_tokens=20)
    all_prompts(d)
    scheduled(d)
    assert d.cache.pool.n_free == 0 and d.cache.pool.n_evictable > 0
    (second,) = ahead(d)
    assert second.positions.tolist() == [BLOCK]
    d.drain()
    assert len(one.answer) == 20


def test_blocks_that_slide_for_a_step_ahead_take_their_cells_along() -> None:
    """The copies belong to the step ahead, in front of its rows; the fake device checks every cell."""
    d = driver(n_blocks=4, n_ctx=250, n_slots=2, n_ubatch=200, cache_prompts=False)
    d.add(text(2 * BLOCK, 1), max_tokens=1)
    top = d.add(text(BLOCK - 1, 2), max_tokens=100)
    all_prompts(d)
    moved = []
    while top.ended is None:
        moved += [ubatch.positions.tolist() for ubatch in step(d) if ubatch.copies]
    assert moved == [[2 * BLOCK]]
    d.drain()


# --- ends, and what is found afterwards ---


@pytest.mark.parametrize("n_prompt", [10, BLOCK - 3, BLOCK - 2, BLOCK - 1, BLOCK])
def test_a_stop_makes_the_step_ahead_one_in_vain(n_prompt: int) -> None:
    """What was written in vain lies behind what the cache keeps, and whoever goes on there overwrites it."""
    d = driver()
    one = d.add(text(n_prompt), max_tokens=20)
    scheduled(d)
    ahead(d)
    commit(d)
    first = d.in_flight[0]
    assert first.links is not None
    (second,) = ahead(d)
    token = next(iter(first.links.values())) % 5
    d.in_flight.popleft()
    ended = d.scheduler.commit(first.ubatch, {"r0": Choice(token, stop=True)}, d.now)
    assert [e.reason for e in ended] == [FinishReason.STOP] and ended[0].report.completion_tokens == 2
    one.append(token)
    one.ended = ended[0]
    d.scheduler.check_integrity()
    assert d.scheduler.live_samples(second) == () and d.cache.pool.n_held == 0
    d._run()
    n_computed = n_prompt + 1  # the stopping token's own row was never wanted
    again = d.add((*one.tokens, 7, 8, 9), max_tokens=5)
    commit(d)
    d.drain()
    assert again.ended is not None and again.ended.report.cached_tokens == n_computed


def test_steps_ahead_leave_the_cache_as_steps_would() -> None:
    found = []
    for goes_ahead in (False, True):
        d = driver()
        one = d.add(text(50), max_tokens=100)
        n_ahead = 0
        while one.ended is None and goes_ahead:
            n_ahead += len(step(d))
        d.drain()
        assert n_ahead == 99 * goes_ahead
        again = d.add((*one.tokens, 1, 2), max_tokens=3)
        d.drain()
        assert again.ended is not None and d.n_rows == 50 + 99 + 3 + 2
        found.append((one.answer, again.ended.report.cached_tokens, d.cache.pool.n_allocated))
    assert found[0] == found[1] and found[0][1] == 50 + 99


def test_another_request_may_share_what_is_ahead_as_soon_as_it_is_known() -> None:
    d = driver()
    one = d.add(text(10), max_tokens=200)
    all_prompts(d)
    while len(one.answer) < 120:
        step(d)
    assert d.in_flight, "a step is in flight"
    other = d.add((*one.tokens, 3), max_tokens=10)
    d.drain()
    assert other.ended is not None and other.ended.report.cached_tokens == len(other.request.prompt) - 1


@pytest.mark.parametrize("when", ["before", "between"])
def test_who_is_aborted_is_left_out_or_its_row_in_vain(when: str) -> None:
    d = driver()
    a, b = d.add(text(5, 1), max_tokens=20), d.add(text(6, 2), max_tokens=20)
    all_prompts(d)
    scheduled(d)
    if when == "before":
        d.abort(a.request.id)
    (second,) = ahead(d)
    if when == "between":
        d.abort(a.request.id)
        d.scheduler.check_integrity()
    assert names(second) == ([b.request.id] if when == "before" else [a.request.id, b.request.id])
    commit(d)
    assert [o.request_id for o in d.scheduler.live_samples(second)] == [b.request.id]
    commit(d)
    d.drain()
    assert len(b.answer) == 20


def test_a_request_under_the_name_of_one_that_was_aborted_gets_nothing_of_its_steps() -> None:
    d = driver()
    d.add(text(5, 1), max_tokens=20)
    all_prompts(d)
    first = scheduled(d)
    (second,) = ahead(d)
    d.abort("r0")
    d.scheduler.add(d.asked["r0"].request, d.now)
    for ubatch in (first, second):
        assert d.scheduler.live_samples(ubatch) == ()
        assert d.scheduler.commit(ubatch, {}, d.now) == ()
        d.scheduler.check_integrity()
    assert d.scheduler.schedule(d.now) is not None


# --- preemption and loss ---


@pytest.mark.parametrize("n_committed", [0, 1])
def test_who_is_preempted_keeps_the_tokens_of_both_steps(n_committed: int) -> None:
    """Everything they need comes before the blocks' next user in the lanes."""
    d = driver(n_slots=2)
    a, b = d.add(text(5, 1), max_tokens=20), d.add(text(6, 2), max_tokens=20)
    all_prompts(d)
    first = scheduled(d)
    (second,) = ahead(d)
    if n_committed:
        commit(d)
    sequence = sequence_of(d, b)
    n_known = sequence.n_known
    d.scheduler.roster.preempt(sequence)
    d.scheduler.check_integrity()
    if not n_committed:
        assert d.scheduler.schedule_ahead(first) is None
        commit(d)
        assert sequence.phase is Phase.WAITING and sequence.is_sampling and d.schedule() is None
    follower = d.scheduler.schedule_ahead(second)
    assert follower is not None and names(follower) == [a.request.id]
    d._submit(follower)
    d.scheduler.check_integrity()
    commit(d)
    assert sequence.n_known == n_known + (2 - n_committed) and not sequence.is_sampling
    assert b.request.id in names(scheduled(d))
    d.drain()
    assert len(b.answer) == 20 and b.ended is not None and b.ended.report.n_preemptions == 1


def test_a_loss_forgets_both_steps_and_their_tokens_are_drawn_again() -> None:
    d = driver()
    one = d.add(text(5), max_tokens=20)
    all_prompts(d)
    scheduled(d)
    ahead(d)
    n_known = len(one.tokens)
    d.lose_device()
    d.scheduler.check_integrity()
    sequence = sequence_of(d, one)
    assert not sequence.is_sampling and not sequence.is_ahead and sequence.n_known == n_known
    d.drain()
    assert len(one.answer) == 20


def test_steps_ahead_are_committed_in_order_and_with_a_token() -> None:
    d = driver()
    d.add(text(5), max_tokens=20)
    all_prompts(d)
    first = scheduled(d)
    (second,) = ahead(d)
    with pytest.raises(InternalError, match="are in flight"):
        d.scheduler.commit(second, {"r0": Choice(1)}, d.now)
    d.scheduler.commit(first, {"r0": Choice(1)}, d.now)
    with pytest.raises(InternalError, match="no token"):
        d.scheduler.commit(second, {}, d.now)


def test_demand_counts_who_is_ahead_as_decoding_and_not_ready() -> None:
    d = driver()
    d.add(text(5), max_tokens=20)
    all_prompts(d)
    scheduled(d)
    for _ in range(3):
        ahead(d)
        demand = d.scheduler.demand()
        assert (demand.n_decoding, demand.n_ready, demand.is_scheduled) == (1, 0, True)
        commit(d)
    d.drain()


@pytest.mark.parametrize("stop_every", [0, 9])
@pytest.mark.parametrize("seed", range(4))
def test_many_requests_with_steps_ahead_get_the_answers_they_must(stop_every: int, seed: int) -> None:
    """Over a pool that is too small for them all, with preemption and aborts at any moment; every step is checked."""
    d, rng, n_ahead = driver(n_blocks=8, n_ctx=300, stop_every=stop_every), random.Random(seed), 0
    for number in range(24):
        d.add(text(rng.randint(1, 110), number % 5), max_tokens=rng.randint(1, 120))
    while not d.scheduler.is_idle:
        for _ in range(rng.randint(0, 2)):
            d.schedule()
        if rng.random() < 0.8:
            n_ahead += len(ahead(d))
        if rng.random() < 0.05 and d.scheduler.n_running:
            d.scheduler.roster.preempt(rng.choice(d.scheduler.roster.running))
        if rng.random() < 0.01 and d.scheduler.roster.live:
            d.abort(rng.choice(list(d.scheduler.roster.live)))
        d.scheduler.check_integrity()
        if d.in_flight:
            commit(d)
    assert all(one.ended is not None for one in d.asked.values()) and n_ahead > 100
    assert d.cache.pool.n_held == 0
