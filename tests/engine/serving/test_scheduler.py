"""Who runs when: fairness, limits, endings, preemption, failures; and several ubatches in flight."""

from __future__ import annotations

import random

import pytest

from app.engine.request import FinishReason
from app.engine.serving.fair import share_rows
from app.engine.serving.sequence import shared_prefix, snapshot_cuts
from app.engine.serving.types import Budget, Choice, Demand, OutputKind, SchedulerConfig
from app.errors import ConfigError, ContextLengthExceeded, InternalError, QueueFull

from .fake_device import Driver


def driver(**fields) -> Driver:
    return Driver(SchedulerConfig(**{"n_slots": 4, "n_blocks": 64, "n_ctx": 2000, "n_ubatch": 64, **fields}))


def text(n: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((i * i * 7 + (i + 1) * seed + i // 3 * seed) % 1000 for i in range(n))


def rows_of(ubatch, request_id: str) -> int:
    return sum(s.n_rows for s in ubatch.sequences if s.request_id == request_id)


# --- demand ---


def test_demand_is_what_is_left_of_prompts_and_who_decodes() -> None:
    d = driver(n_slots=2)
    a = d.add(text(10, seed=9), max_tokens=20)
    d.add(text(100, seed=3), max_tokens=20)
    assert d.scheduler.demand() == Demand(((10, 0), (100, 0)), 0)
    while not a.answer:
        d.step(budget=Budget(n_prompt=20))
    d.step(budget=Budget(n_prompt=20))
    demand = d.scheduler.demand()
    assert demand.n_decoding == 1 and 0 < demand.n_prompt_tokens < 100 and demand.n_prompt_tokens % 10 == 0
    assert demand.prompts == ((demand.n_prompt_tokens, 100 - demand.n_prompt_tokens),)
    d.add(text(30, seed=5), max_tokens=20)  # waits for a slot
    assert d.scheduler.demand() == Demand((*demand.prompts, (30, 0)), 1, demand.n_ready)


def test_demand_tells_what_is_in_flight_already() -> None:
    d = driver(n_slots=2)
    a = d.add(text(10, seed=9), max_tokens=20)
    d.add(text(12, seed=3), max_tokens=20)
    while not a.answer:
        d.step()
    for n_ready in (2, 1):
        now = d.scheduler.demand()
        assert (now.n_decoding, now.n_ready, now.is_scheduled) == (2, n_ready, False)
        assert d.scheduler.schedule(d.now, Budget(n_decode=1)) is not None
    assert d.scheduler.demand().is_scheduled and d.scheduler.schedule(d.now) is None


# --- sharing rows ---


def test_the_oldest_gets_half_and_the_shortest_the_rest() -> None:
    assert share_rows([1000, 1000, 3, 10], 64) == [32 + 19, 0, 3, 10]
    assert share_rows([1000, 40, 30], 64) == [32, 2, 30]
    assert share_rows([5, 1000], 64) == [5, 59]
    assert share_rows([50, 50, 50], 64) == [50, 14, 0]
    assert share_rows([7], 64) == [7]
    assert share_rows([7, 1], 1) == [1, 0]
    assert share_rows([], 64) == []


def test_shares_add_up() -> None:
    rng = random.Random(2)
    for _ in range(300):
        needs = [rng.randint(1, 200) for _ in range(rng.randint(1, 8))]
        n_rows = rng.randint(1, 300)
        shares = share_rows(needs, n_rows)
        assert sum(shares) == min(n_rows, sum(needs))
        assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))


@pytest.mark.parametrize("n_short", [1, 6])
def test_a_short_request_does_not_wait_for_long_prompts(n_short: int) -> None:
    """A decodes; B brings a prompt of 100 chunks; then short ones; then six more like B."""
    d = driver(n_slots=16, n_blocks=2000, n_ctx=7000)
    a = d.add(text(10, seed=9), max_tokens=2000)
    while not a.answer:
        d.step()
    b = d.add(text(6400), max_tokens=4)
    d.step()
    shorts = [d.add(text(5, seed=20 + i), max_tokens=4) for i in range(n_short)]
    longs = [d.add(text(6400, seed=30 + i), max_tokens=4) for i in range(6)]
    gap = longest_gap = n_steps = 0
    first_token: dict[str, int] = {}
    while b.ended is None and a.ended is None:
        n_had = len(a.answer)
        ubatch = d.step()
        n_steps += 1
        gap = 0 if len(a.answer) > n_had else gap + 1
        longest_gap = max(gap, longest_gap)
        for one in (*shorts, b):
            if one.answer:
                first_token.setdefault(one.request.id, n_steps)
        assert rows_of(ubatch, b.request.id) > 0, "the oldest prompt advances with every ubatch"
    assert longest_gap <= 1
    assert all(first_token[s.request.id] <= 3 for s in shorts)
    assert first_token[b.request.id] <= 230
    for one in (*longs, a):
        d.abort(one.request.id)
    d.drain()


@pytest.mark.parametrize("n_ubatch", [1, 2, 4])
def test_prompts_advance_even_where_decode_alone_would_fill_every_ubatch(n_ubatch: int) -> None:
    d = driver(n_slots=6, n_ubatch=n_ubatch)
    for seed in range(5):
        d.add(text(3, seed=seed), max_tokens=400)
    late = d.add(text(40, seed=7), max_tokens=1)
    for _ in range(2 * 40 + 40):
        d.step()
    assert late.ended is not None
    assert min(len(a.answer) for a in list(d.asked.values())[:5]) > 5


def test_decode_turns_are_fair_when_groups_are_small() -> None:
    d = driver(n_slots=6)
    asked = [d.add(text(4, seed=s), max_tokens=300) for s in range(6)]
    for _ in range(60):
        d.step(2, Budget(n_decode=2))
    counts = [len(a.answer) for a in asked if a.ended is None]
    assert max(counts) - min(counts) <= 2


# --- limits of one call ---


def test_a_budget_limits_rows_chunks_and_groups() -> None:
    d = driver(n_slots=4, n_ubatch=64)
    for seed in range(3):
        d.add(text(10, seed=seed), max_tokens=50)
    d.step()
    d.add(text(500, seed=9), max_tokens=1)
    ubatch = d.schedule(Budget(n_prompt=7, n_decode=2))
    assert (ubatch.n_decode, ubatch.n_tokens) == (2, 9)
    ubatch = d.schedule(Budget(n_tokens=20))
    assert (ubatch.n_decode, ubatch.n_tokens) == (1, 20)
    assert d.schedule(Budget(n_prompt=0)) is None
    assert d.schedule(Budget(n_tokens=0)) is None
    d.drain()


def test_prompt_chunks_follow_each_other_without_a_commit_and_tokens_do_not() -> None:
    d = driver()
    d.add(text(200), max_tokens=3)
    assert [d.schedule().n_tokens for _ in range(4)] == [64, 64, 64, 8]
    assert d.schedule() is None
    for _ in range(4):
        assert d.schedule() is None or d.in_flight
        d.commit()
    assert d.schedule().n_decode == 1
    d.drain()


def test_equal_lengths_keep_decode_and_prompts_apart_and_alternate() -> None:
    d = driver(equal_lengths=True, n_slots=6)
    for seed in range(3):
        d.add(text(5, seed=seed), max_tokens=60)
    d.step()
    assert rows_of(d.in_flight[0].ubatch if d.in_flight else d.schedule(), "r0") in (1, 5)
    d.drain()
    for seed in range(3):
        d.add(text(5, seed=seed + 10), max_tokens=60)
    d.step()
    d.add(text(640, seed=20), max_tokens=1)
    kinds = [d.step() for _ in range(12)]
    assert [u.n_decode > 0 for u in kinds[:4]] in ([True, False] * 2, [False, True] * 2)
    assert all(len({s.n_rows for s in u.sequences}) == 1 for u in kinds)
    d.drain()


def test_equal_prompts_go_together() -> None:
    d = driver(equal_lengths=True)
    for seed in range(4):
        d.add(text(16, seed=seed), max_tokens=1)
    ubatch = d.schedule()
    assert [s.n_rows for s in ubatch.sequences] == [16] * 4
    d.drain()


def test_outputs_are_limited_where_the_plan_has_few() -> None:
    d = driver(max_outputs=3, n_slots=4)
    d.add(text(40), max_tokens=2, prompt_logprobs=True)
    for seed in range(2, 5):
        d.add(text(5, seed=seed), max_tokens=5)
    d.drain()


# --- endings ---


@pytest.mark.parametrize("n_slots", [1, 2])
def test_a_full_context_ends_with_length_and_harms_nobody(n_slots: int) -> None:
    """Context 256, prompt 200: the answer has 56 tokens. The other shares the pool, which is too small for both."""
    d = driver(n_ctx=256, n_blocks=5, n_slots=n_slots)
    d.add(text(200), max_tokens=500)
    other = d.add(text(150, seed=3), max_tokens=None)
    d.drain()
    first = d.asked["r0"].ended
    assert first.reason is FinishReason.LENGTH
    assert (first.report.prompt_tokens, first.report.completion_tokens) == (200, 56)
    assert len(other.answer) == 256 - 150


@pytest.mark.parametrize("n_prompt", [510, 511])
def test_the_longest_prompt_that_fits(n_prompt: int) -> None:
    d = driver(n_ctx=512, n_blocks=8)
    asked = d.add(text(n_prompt), max_tokens=64)
    d.drain()
    assert len(asked.answer) == 512 - n_prompt


@pytest.mark.parametrize("n_prompt", [512, 513, 5000])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(n_prompt: int) -> None:
    d = driver(n_ctx=512, n_blocks=8)
    with pytest.raises(ContextLengthExceeded) as refusal:
        d.add(text(n_prompt))
    assert (refusal.value.prompt_tokens, refusal.value.context_tokens) == (n_prompt, 512)
    assert d.scheduler.is_idle


def test_no_tokens_wanted_computes_the_prompt_alone() -> None:
    d = driver()
    asked = d.add(text(100), max_tokens=0, prompt_logprobs=True)
    d.drain()
    assert asked.ended.reason is FinishReason.LENGTH and asked.answer == ()
    assert sorted(asked.scored) == list(range(1, 100))


def test_prompt_logprobs_need_every_row_and_warm_the_cache_for_others() -> None:
    d = driver()
    for _ in range(2):
        asked = d.add(text(100), max_tokens=1, prompt_logprobs=True)
        d.drain()
        assert asked.ended.report.cached_tokens == 0
    plain = d.add(text(100), max_tokens=1)
    d.drain()
    assert plain.ended.report.cached_tokens == 99


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("trouble", ["preempted", "device lost"])
def test_every_prompt_token_is_scored_once_whatever_happens(trouble: str, in_flight: int) -> None:
    d = driver(n_ubatch=30)
    asked = d.add(text(100), max_tokens=3, prompt_logprobs=True)
    for _ in range(2):
        d.step()
    for _ in range(in_flight):
        d.schedule()
    if trouble == "preempted":
        d.scheduler.roster.preempt(d.scheduler.roster.running[0])
    else:
        d.lose_device()
    d.drain()
    assert sorted(asked.scored) == list(range(1, 100))  # the driver refuses doubles


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    d = driver(n_slots=2, max_queue=3)
    for seed in range(5):
        d.add(text(20, seed=seed), max_tokens=30)
    with pytest.raises(QueueFull) as refusal:
        d.add(text(20, seed=9))
    assert 1 <= refusal.value.retry_after_s <= 60
    d.drain()
    d.add(text(20, seed=9), max_tokens=1)
    d.drain()
    assert d.scheduler.counters()["requests_rejected_total"] == 1


def test_deadlines_end_what_waits_and_what_runs() -> None:
    d = driver(n_slots=1)
    d.add(text(20), deadline_s=5.0)
    d.add(text(20, seed=2), deadline_s=5.0)
    d.add(text(20, seed=3), max_tokens=2)
    while d.now < 4:
        d.step()
    assert d.scheduler.expire(d.now) == ()
    d.step()
    late = d.scheduler.expire(d.now)
    assert [e.request_id for e in late] == ["r0", "r1"]
    for one in late:
        d.finish(one)
    d.drain()


# --- cancelling ---


def test_cancelling_a_long_prompt_frees_its_place_for_the_very_next_ubatch() -> None:
    d = driver(n_slots=1, n_ctx=4000)
    d.add(text(3000), max_tokens=5)
    for _ in range(10):
        d.schedule()  # ten chunks in flight
    d.add(text(8, seed=5), max_tokens=4)
    assert d.schedule() is not None
    d.abort("r0")
    ubatch = d.schedule()
    assert [s.request_id for s in ubatch.sequences] == ["r1"]
    d.drain()


def test_what_a_cancelled_prompt_had_submitted_is_reused_and_right() -> None:
    d = driver(n_slots=1, n_ctx=4000)
    d.add(text(3000), max_tokens=5)
    for _ in range(10):
        d.schedule()
    d.abort("r0")
    half = d.add(text(1500), max_tokens=5)
    d.drain()
    assert half.ended.report.cached_tokens == 640


def test_cancelling_while_the_token_is_being_computed() -> None:
    d = driver()
    d.add(text(30), max_tokens=5)
    ubatch = d.schedule()
    d.abort("r0")
    assert d.scheduler.live_samples(ubatch) == ()
    d.drain()
    assert d.scheduler.abort("r0") is None


def test_an_id_that_comes_again_does_not_get_the_old_ones_token() -> None:
    d = driver()
    d.add(text(30), max_tokens=5)
    stale = d.schedule()
    d.scheduler.abort("r0")
    d.asked.clear()
    again = d.add(text(30, seed=2), max_tokens=5)
    assert d.scheduler.live_samples(stale) == ()
    d.drain()
    assert again.ended is not None


# --- memory runs short ---


def test_the_youngest_makes_room_and_goes_on_where_it_was() -> None:
    d = driver(n_slots=3, n_blocks=9, n_ctx=450)
    asked = [d.add(text(30, seed=10 * s), max_tokens=350) for s in range(3)]
    d.drain(3)
    assert d.scheduler.counters()["preemptions_total"] > 0
    assert asked[0].ended.report.n_preemptions == 0
    assert [len(a.answer) for a in asked] == [350] * 3


def test_who_is_preempted_while_its_token_is_being_computed_waits_for_it() -> None:
    d = driver()
    d.add(text(100), max_tokens=5)
    d.step()
    d.schedule()
    roster = d.scheduler.roster
    roster.preempt(roster.running[0])
    assert d.schedule() is None
    d.commit()
    assert len(d.asked["r0"].answer) == 1
    d.drain()


def test_a_preempted_request_reuses_what_is_left_of_it() -> None:
    d = driver(n_slots=2, n_blocks=12, n_ctx=700)
    d.add(text(60), max_tokens=600)
    d.add(text(60, seed=40), max_tokens=600)
    d.drain()
    n_least = 2 * (60 + 599)
    assert d.scheduler.counters()["preemptions_total"] >= 1
    assert n_least < d.n_rows < n_least + 650


def test_a_request_that_does_not_fit_beside_others_waits_instead_of_thrashing() -> None:
    d = driver(n_slots=4, n_blocks=10, n_ctx=640)
    lengths = (600, 500, 400, 300)
    for seed, n in enumerate(lengths):
        d.add(text(n, seed=seed), max_tokens=10)
    d.drain()
    assert d.scheduler.counters()["preemptions_total"] == 0
    assert d.n_rows == sum(lengths) + 4 * 9


def test_a_prompt_in_work_gets_the_rows_that_the_oldest_and_the_shortest_have_no_memory_to_use() -> None:
    d = driver(n_slots=12, n_blocks=40, n_ctx=2500)
    d.add(text(32), max_tokens=3)
    d.step()
    d.add(text(2440, seed=5), max_tokens=4)  # has to wait for all the others
    d.add(text(1480, seed=6), max_tokens=4)
    d.step()
    d.add(text(981, seed=7), max_tokens=4)  # the shortest now, and one block too long
    assert d.scheduler.n_running == 2
    d.drain()
    assert d.scheduler.counters()["preemptions_total"] == 0


@pytest.mark.parametrize("n_prompt", range(180, 184))
def test_a_younger_one_already_in_the_ubatch_makes_room_for_an_older_one(n_prompt: int) -> None:
    d = driver(n_slots=2, n_blocks=5, n_ctx=300)
    d.add(text(n_prompt), max_tokens=60)
    d.add(text(60, seed=5), max_tokens=60)
    while d.scheduler.n_running < 2 or min(len(a.answer) for a in d.asked.values()) == 0:
        d.step()
    while d.scheduler.counters()["preemptions_total"] == 0:
        d.step(1, Budget(n_decode=1))
        d.step()  # the younger comes first here: it waits longer
    d.drain()


# --- failures ---


def test_a_lost_device_is_survived_by_recomputing() -> None:
    d = driver()
    asked = [d.add(text(150, seed=s), max_tokens=40) for s in range(6)]
    for _ in range(9):
        d.step(3)
    had = [a.answer for a in asked]
    d.lose_device()
    d.scheduler.check_integrity()
    assert d.cache.pool.n_used == 0 and d.scheduler.n_running == 0
    d.drain(3)
    assert all(a.answer[: len(h)] == h for a, h in zip(asked, had, strict=True))


def test_failing_everything_leaves_nothing_behind() -> None:
    d = driver(n_slots=2)
    for seed in range(5):
        d.add(text(150, seed=seed), max_tokens=40)
    stale = d.schedule()
    reports = d.scheduler.fail_all()
    assert [r.request_id for r in reports] == [f"r{i}" for i in range(5)]
    assert d.scheduler.is_idle and d.cache.pool.n_used == 0
    assert d.scheduler.commit(stale, {}, 0.0) == ()
    d.scheduler.check_integrity()


def test_misuse_is_an_internal_error() -> None:
    d = driver()
    d.add(text(100), max_tokens=4)
    first, second = d.schedule(), d.schedule()
    with pytest.raises(InternalError, match="in flight"):
        d.scheduler.commit(second, {}, 0.0)
    d.scheduler.commit(first, {}, 0.0)
    with pytest.raises(InternalError, match="no token was drawn"):
        d.scheduler.commit(second, {}, 0.0)
    with pytest.raises(InternalError, match="here already"):
        d.scheduler.add(d.asked["r0"].request, 0.0)


# --- reports ---


def test_progress_slots_and_counters_tell_the_truth() -> None:
    d = driver(n_slots=2)
    d.add(text(100), max_tokens=2)
    d.drain()
    d.add(text(90) + text(90, seed=5), max_tokens=2)
    ubatch = d.schedule()
    assert ubatch.started == ("r1",)
    report = d.scheduler.report("r1")
    assert (report.prompt_tokens, report.cached_tokens, report.processed_tokens) == (180, 90, 90)
    d.commit()
    assert d.scheduler.report("r1").processed_tokens == 154
    slot = d.scheduler.slots()[0]
    assert (slot.busy, slot.request_id, slot.n_prompt, slot.n_cached, slot.n_processed) == (True, "r1", 180, 90, 154)
    assert not d.scheduler.slots()[1].busy
    assert d.schedule().started == ()
    d.drain()
    assert d.scheduler.report("r1") is None
    counters = d.scheduler.counters()
    assert counters["cached_tokens_total"] == 90 and counters["prompt_tokens_total"] == 280
    assert counters["requests_length_total"] == 2 and counters["requests_stop_total"] == 0
    assert counters["prompt_rows_total"] == 190


def test_a_sample_output_names_the_position_it_draws_for() -> None:
    d = driver()
    d.add(text(10), max_tokens=3)
    ubatch = d.schedule()
    (output,) = ubatch.outputs
    assert (output.kind, output.row, output.position) == (OutputKind.SAMPLE, 9, 10)
    d.drain()


def test_a_choice_that_stops_ends_the_request() -> None:
    d = driver()
    d.add(text(10), max_tokens=3)
    ubatch = d.schedule()
    (ended,) = d.scheduler.commit(ubatch, {"r0": Choice(7, stop=True)}, 5.0)
    assert ended.reason is FinishReason.STOP and ended.report.completion_tokens == 1


@pytest.mark.parametrize("field", ["n_slots", "n_blocks", "n_ctx", "n_ubatch"])
def test_settings_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        driver(**{field: 0})


def test_a_context_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="640 cells"):
        driver(n_blocks=10, n_ctx=700)


# --- small parts ---


def test_shared_prefix() -> None:
    rng = random.Random(4)
    for _ in range(200):
        a = [rng.randint(0, 1) for _ in range(rng.randint(0, 40))]
        b = a[: rng.randint(0, 40)] + [rng.randint(0, 1) for _ in range(rng.randint(0, 5))]
        n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert shared_prefix(a, b) == n


def test_snapshot_cuts() -> None:
    def cuts(n: int, *starts: int) -> tuple[int, ...]:
        return snapshot_cuts(n, starts, interval_tokens=100, spacing_tokens=30, n_most=3)

    assert cuts(1) == ()
    assert cuts(2) == (1,)
    assert cuts(250) == (100, 200, 249)
    assert cuts(90, 0, 10, 50, 70, 85, 95) == (50, 85, 89)  # a long first message, and the answer's start
    assert cuts(99, 31, 62, 63, 80, 97) == (31, 62, 97, 98)
    assert cuts(99, 10, 20) == (20, 98)
    assert cuts(99, 98) == (98,)
    many = tuple(range(50, 900, 50))
    assert snapshot_cuts(900, many, interval_tokens=900, spacing_tokens=30, n_most=2) == (800, 850, 899)
