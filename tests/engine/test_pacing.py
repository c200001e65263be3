"""Chunks and groups from stage times that are given here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.buckets import bucket, buckets
from app.engine.pacing import LEAST_BESIDE, Pacing, Prompt
from app.engine.stage_times import MIN_CHUNK, StageTimes

SIZES = buckets(512)


def measured(*stages: Callable[[int], float], alone_s: float = 0.0, sizes: Sequence[int] = SIZES) -> Pacing:
    """Stages that take so long for so many rows, and this much longer from end to end when they were idle."""
    pacing = Pacing(sizes)
    for number, seconds in enumerate(stages):
        for size in sizes:
            for _ in range(3):
                pacing.note(number, size, 0, seconds(size), queued=True)
                pacing.note(number, size, 0, seconds(size) + alone_s, queued=False)
    return pacing


def per_row(fixed_rows: float) -> Callable[[int], float]:
    return lambda n: 1e-3 * (fixed_rows + n)


def finish_s(sizes: Sequence[int], *stages: Callable[[int], float]) -> float:
    """The flow shop, run step by step."""
    free = [0.0] * len(stages)
    for n_rows in sizes:
        at = 0.0
        for number, seconds in enumerate(stages):
            at = free[number] = max(at, free[number]) + seconds(bucket(n_rows, 512))
    return free[-1]


def equal(n_tokens: int, chunk: int) -> list[int]:
    return [min(chunk, n_tokens - start) for start in range(0, n_tokens, chunk)]


def test_one_stage_takes_the_largest_chunk_and_one_group() -> None:
    pacing = measured(per_row(1))
    assert pacing.prompt_chunk(1, [(2048, 0)]) == 512
    assert pacing.n_groups(1, 16) == 1


@pytest.mark.parametrize("n_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("fixed_rows", [2, 20, 100])
@pytest.mark.parametrize("n_tokens", [100, 1000, 4096])
def test_a_prompt_alone_goes_in_the_chunks_that_finish_first(n_stages: int, fixed_rows: float, n_tokens: int) -> None:
    stages = [per_row(fixed_rows)] * n_stages
    best_s = min(finish_s(equal(n_tokens, size), *stages) for size in SIZES if size >= MIN_CHUNK)
    assert finish_s(chunks(measured(*stages), n_stages, n_tokens), *stages) <= 1.05 * best_s


def test_the_last_stage_of_a_long_prompt_hardly_waits() -> None:
    """2,048 tokens over two equal stages: within the reach of 1.75 times one stage."""
    one_s, half = finish_s(equal(2048, 512), lambda n: 2e-3 * (8 + n)), per_row(8)
    assert one_s / finish_s(chunks(measured(half, half), 2, 2048), half, half) > 1.75
    assert one_s / finish_s(equal(2048, 512), half, half) < 1.75


def test_a_prompt_begins_with_half_a_chunk_and_none_is_longer_than_the_second() -> None:
    for fixed_rows in (8, 50):
        sizes = chunks(measured(per_row(fixed_rows), per_row(fixed_rows)), 2, 4096)
        assert sizes[0] <= 0.75 * sizes[1] and max(sizes) == sizes[1]
    noisy = Pacing(SIZES)
    for number in range(6):  # too few to say anything, and such that a row seems to cost nothing
        noisy.note(0, 128, 0, 0.3 - 0.01 * number, queued=True)
        noisy.note(1, 64 if number % 2 else 128, 0, 0.3, queued=True)
    sizes = chunks(noisy, 2, 4096)
    assert max(sizes) <= 2 * sizes[0]


def test_the_end_behind_a_slow_first_stage_is_small() -> None:
    slow, fast = per_row(4), lambda n: 0.5e-3 * (4 + n)
    pacing, ahead = measured(slow, fast), [(256, 0.0)] * 3
    assert pacing.prompt_chunk(2, [(8192, 0)], ahead) > pacing.prompt_chunk(2, [(256, 0)], ahead)


def test_the_last_chunks_take_no_longer_than_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever noisy times say of them: a long one drains the pipeline for as long as it takes."""
    pacing = seen(2)
    pacing.prompt_chunk(2, [(2048, 0)])
    monkeypatch.setattr(pacing, "_first_chunk", lambda *_: 512)
    sizes = [pacing.prompt_chunk(2, [(2048 - past, past)]) for past in range(192, 2048, 64)]
    assert sizes == sorted(sizes, reverse=True)


def test_decode_alone_does_not_tell_that_nothing_is_fixed_of_a_chunk() -> None:
    pacing = Pacing(SIZES)
    for stage in range(3):
        for n_rows in (1, 4, 8, 16, 24):
            for _ in range(3):
                pacing.note(stage, n_rows, 0, 1e-3 * n_rows, queued=True)
    assert min(chunks(pacing, 3, 1766)[1:-1]) > 64


def test_chunks_of_equal_stages_stay_as_long_as_those_in_front() -> None:
    """The longest ubatch fills and drains the pipeline; shorter ones behind it win nothing."""
    assert measured(per_row(16), per_row(16)).prompt_chunk(2, [(128, 0)], [(128, 0.0)] * 2) >= 128


def test_groups_where_rows_cost_and_one_where_they_do_not() -> None:
    assert measured(per_row(1), per_row(1)).n_groups(2, 16) == 2
    assert measured(*[per_row(1)] * 4).n_groups(4, 16) == 4
    assert measured(per_row(1000), per_row(1000)).n_groups(2, 16) == 1
    assert measured(per_row(1), per_row(1)).n_groups(2, 1) == 1


def test_groups_end_when_they_turn_out_not_to_pay() -> None:
    pacing = Pacing(SIZES)
    for stage in (0, 1):
        pacing.note(stage, 16, 0, 0.020, queued=False)
    assert pacing.n_groups(2, 16) == 2  # half the rows promise less than 0.95 of the time
    for stage in (0, 1):
        for _ in range(3):
            pacing.note(stage, 16, 0, 0.020, queued=False)
            pacing.note(stage, 8, 0, 0.0199, queued=True)
            pacing.note(stage, 8, 0, 0.0205, queued=False)
    assert pacing.n_groups(2, 16) == 1


def test_links_ask_for_more_ubatches_in_flight() -> None:
    assert measured(per_row(0), per_row(0)).n_in_flight(2, 128) == 4
    assert measured(per_row(0), per_row(0), alone_s=0.128).n_in_flight(2, 128) == 5
    assert measured(per_row(0), per_row(0), alone_s=100.0).n_in_flight(2, 128) == 8
    assert Pacing(SIZES).n_in_flight(3, 128) == 5


def test_one_slow_run_of_a_size_is_not_believed() -> None:
    """It prepared the shape, and would keep the size from ever being tried again."""
    pacing = Pacing(SIZES)
    for stage in range(4):
        pacing.note(stage, 4, 0, 0.5, queued=False)
        for _ in range(5):
            pacing.note(stage, 1, 0, 0.0075, queued=False)
            pacing.note(stage, 16, 0, 0.019, queued=False)
    assert pacing.n_groups(4, 16) == 4


def test_a_slow_first_run_is_soon_forgotten() -> None:
    pacing = measured(per_row(8), per_row(8))
    want = chunks(pacing, 2, 2048)[:2]
    pacing.note(0, 512, 0, 60.0, queued=True)
    for _ in range(12):
        pacing.note(0, 512, 0, 0.52, queued=True)
    assert chunks(pacing, 2, 2048)[:2] == want


def seeing(n_rows: int, cells: float) -> float:
    """A stage for which what a row sees counts as much as the row itself once that are 1,000 cells."""
    return 1e-3 * (4 + n_rows) + 1e-6 * cells


def cells_of(n_rows: int, past: int) -> float:
    return n_rows * (past + n_rows / 2)


def seen(n_stages: int, *, rounds: int = 4, chunk: int = 128) -> Pacing:
    """Stages that have done prompts of 2,048 tokens in chunks of one size."""
    pacing = Pacing(SIZES)
    for _ in range(rounds):
        for past in range(0, 2048, chunk):
            for stage in range(n_stages):
                cells = cells_of(chunk, past)
                pacing.note(stage, chunk, cells, seeing(chunk, cells), queued=True)
    return pacing


def chunks(pacing: Pacing, n_stages: int, n_tokens: int) -> list[int]:
    """All chunks of one prompt, as an engine asks for them."""
    sizes: list[int] = []
    flying: list[tuple[int, float]] = []
    past = 0
    while past < n_tokens:
        in_flight = flying[-3:]
        n_rows = min(n_tokens - past, pacing.prompt_chunk(n_stages, [(n_tokens - past, past)], in_flight))
        sizes.append(n_rows)
        flying.append((n_rows, cells_of(n_rows, past)))
        past += n_rows
    return sizes


def test_chunks_take_the_same_time_not_the_same_rows() -> None:
    sizes = chunks(seen(2), 2, 2048)
    assert sum(sizes) == 2048 and sizes[1] >= 1.5 * sizes[-2]
    times, past = [], 0
    for n_rows in sizes:
        times.append(seeing(n_rows, cells_of(n_rows, past)))
        past += n_rows
    assert max(times) < 1.6 * min(times[1:-1])
    assert 2 * sum(times) / (sum(times) + max(times)) > 1.85  # over two stages, as a part of one


def test_the_time_of_what_rows_see_is_told_from_that_of_the_rows() -> None:
    times = StageTimes()
    for past in (0, 128, 256, 512, 1024, 1920) * 3:
        times.note(128, cells_of(128, past), seeing(128, cells_of(128, past)), queued=True)
    for past in (0, 4096):
        cells = cells_of(128, past)
        assert times.seconds(128, cells) == pytest.approx(seeing(128, cells), rel=0.05)
    cells = cells_of(64, 2048)
    assert times.seconds(64, cells) == pytest.approx(seeing(64, cells), rel=0.05)


def test_a_second_prompt_is_paced_together_with_the_first() -> None:
    pacing = seen(2)
    alone = pacing.prompt_chunk(2, [(64, 1984)])
    assert alone == MIN_CHUNK
    assert pacing.prompt_chunk(2, [(64, 1984), (4096, 0)]) > alone


def test_the_size_that_prompts_began_with_stays_while_it_is_as_good() -> None:
    def chosen(pacing: Pacing) -> int:
        pacing.prompt_chunk(2, [(16, 2032)])  # the end of the prompt before
        return pacing.prompt_chunk(2, [(2048, 0)])

    pacing = measured(per_row(8), per_row(8))
    first = chosen(pacing)
    other = next(n for n in range(8, 100) if chosen(measured(per_row(n), per_row(n))) != first)
    for size in SIZES * 20:
        for stage in (0, 1):
            pacing.note(stage, size, 0, per_row(other)(size), queued=True)
    assert chosen(pacing) == first


def test_a_prompt_is_worked_out_once() -> None:
    """Between its beginning and its last chunks they take as long as the first whole one would; more to do is new."""
    pacing = seen(2)
    opening = pacing.prompt_chunk(2, [(4096, 0)])
    chunk = pacing.prompt_chunk(2, [(4096 - opening, opening)])
    assert opening < chunk < 512
    for size in SIZES * 20:  # as if rows cost nothing: seen when there is more to do
        for stage in (0, 1):
            pacing.note(stage, size, 0, 1.0, queued=True)
    assert pacing.prompt_chunk(2, [(3500, 596)]) <= 2 * opening
    assert pacing.prompt_chunk(2, [(3500, 596), (10, 0)]) == 512


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 512), st.floats(0, 1e6), st.floats(0, 10), st.booleans()),
        max_size=30,
    ),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 10_000)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1e6)), max_size=8),
    st.sampled_from([1, 7, 64, 512]),
)
def test_whatever_was_measured_decisions_are_within_limits(
    samples: list[tuple[int, int, float, float, bool]],
    n_stages: int,
    prompts: list[Prompt],
    in_flight: list[tuple[int, float]],
    largest: int,
) -> None:
    pacing = Pacing(buckets(largest))
    for stage, n_rows, cells, seconds, queued in samples:
        pacing.note(stage, n_rows, cells, seconds, queued=queued)
    for _ in range(2):
        assert 1 <= pacing.prompt_chunk(n_stages, prompts, in_flight) <= largest
    assert 1 <= pacing.n_groups(n_stages, prompts[0][0]) <= n_stages
    assert n_stages + 1 <= pacing.n_in_flight(n_stages, *in_flight[0] if in_flight else (1,)) <= max(2, 4 * n_stages)


def test_a_chunk_beside_decode_may_double_a_step_and_fills_its_size() -> None:
    pacing = measured(per_row(8))
    assert pacing.chunk_beside(1, [(2000, 0)], ready=(64, 0.0), now=(64, 0.0)) == 128 - 64
    assert pacing.chunk_beside(1, [(2000, 0)], ready=(30, 0.0), now=(34, 0.0)) == 96 - 30  # 34 count as 48
    assert pacing.chunk_beside(1, [(2000, 0)], ready=(0, 0.0), now=(64, 0.0)) == 128


def test_a_chunk_beside_a_lone_stream_is_short_but_a_chunk() -> None:
    chunk = measured(per_row(0)).chunk_beside(1, [(2000, 0)], ready=(1, 0.0), now=(1, 0.0))
    assert LEAST_BESIDE <= chunk == bucket(LEAST_BESIDE + 1, 512) - 1


def test_a_chunk_beside_decode_leaves_no_row_of_its_size_empty() -> None:
    """A step of 128 + 5 rows is padded to 192."""
    pacing = measured(*[lambda _: 0.01] * 2)
    assert pacing.chunk_beside(2, [(2000, 0)], ready=(5, 0.0), now=(5, 0.0), most=128) == 128 - 5
    assert pacing.chunk_beside(2, [(2000, 0)], ready=(100, 0.0), now=(100, 0.0), most=64) == 192 - 100


def test_a_chunk_beside_as_many_as_there_is_room_for_is_one_row() -> None:
    assert measured(per_row(1)).chunk_beside(1, [(2000, 0)], ready=(512, 0.0), now=(512, 0.0)) == 1


def test_where_rows_cost_nothing_a_chunk_beside_decode_is_the_largest() -> None:
    assert measured(lambda _: 0.01).chunk_beside(1, [(2000, 0)], ready=(4, 0.0), now=(4, 0.0)) == 512 - 4


def test_of_a_prompt_that_sees_much_fewer_rows_go_beside_decode() -> None:
    pacing = Pacing(SIZES)
    for size in SIZES:
        for cells in (0.0, 1e5, 0.0, 1e5, 0.0):
            pacing.note(0, size, cells, 1e-3 * (8 + size) + 1e-7 * cells, queued=True)
    early = pacing.chunk_beside(1, [(2000, 0)], ready=(64, 0.0), now=(64, 0.0))
    late = pacing.chunk_beside(1, [(2000, 8000)], ready=(64, 0.0), now=(64, 0.0))
    assert LEAST_BESIDE <= late < early
