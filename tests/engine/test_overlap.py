"""What is learned from ubatches that have run, and what is not; times are given."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from app.engine.buckets import buckets
from app.engine.executor import Running
from app.engine.overlap import AHEAD_BELOW_S, LEARNED_TOGETHER, Overlap
from app.engine.serving.types import Demand, Output, OutputKind, Ubatch, UbatchSequence
from app.engine.trace import StageMarks, UbatchMarks

N_STAGES = 2
PROMPT = Demand(prompts=((2048, 0),), n_decoding=0)


def ran(number: int, n_rows: int, stage_s: float, n_prepared: int) -> tuple[Running, float]:
    """A ubatch that every stage took as long for, and when the last one was done."""
    rows = np.arange(n_rows)
    ubatch = Ubatch(
        id=number, epoch=0, tokens=rows.astype(np.int32), positions=rows.astype(np.int32),
        cells=rows.astype(np.int64), slots=np.zeros(n_rows, np.int32), sequences=(), outputs=(),
    )  # fmt: skip
    began_s = 100.0 * number
    ends_s = [began_s + stage_s * (stage + 1) for stage in range(N_STAGES)]
    stages = [StageMarks(None, None, end_s) for end_s in ends_s]
    done: Future[None] = Future()
    done.set_result(None)
    return Running(ubatch, done, 1, None, UbatchMarks(lambda: 0.0, began_s, n_rows, stages), n_prepared), ends_s[-1]


def first_chunk(*, prepares: bool) -> int | None:
    """Of a prompt, after ubatches whose rows cost nothing and whose number is dear."""
    overlap = Overlap(buckets(512), N_STAGES, None)
    for number, n_rows in enumerate((64, 128, 256, 512) * 3):
        running, now_s = ran(number, n_rows, 0.5, n_prepared=number)
        overlap.note(running, now_s, number + prepares)
    return overlap.budget(N_STAGES, PROMPT, ()).n_prompt


def test_stages_teach_how_long_chunks_are() -> None:
    assert first_chunk(prepares=False) == 512


def test_ubatches_beside_which_programs_were_prepared_teach_nothing() -> None:
    unmeasured = Overlap(buckets(512), N_STAGES, None).budget(N_STAGES, PROMPT, ()).n_prompt
    assert first_chunk(prepares=True) == unmeasured != 512


def test_a_prompt_beside_decode_fills_the_size_of_its_step() -> None:
    """Of sequences that decode and are not in flight each has a row in the step."""
    overlap = Overlap(buckets(512), N_STAGES, None)
    n_prompt = overlap.budget(N_STAGES, Demand(prompts=((2048, 0),), n_decoding=5), ()).n_prompt
    assert n_prompt is not None and n_prompt + 5 in buckets(512)


def test_over_one_stage_who_is_ready_waits_for_the_group_in_flight() -> None:
    """Two groups of half the size each cost nearly as much as one of all, and would go on for ever."""
    overlap = Overlap(buckets(512), N_STAGES, None)
    decoding = Demand(prompts=(), n_decoding=8)
    assert overlap.budget(1, decoding, ()).n_decode == 8
    assert overlap.budget(1, decoding, [ran(1, 4, 0.5, n_prepared=0)[0]]).n_decode == 0


def test_what_ran_is_told_at_once_when_nothing_runs_and_together_else() -> None:
    overlap = Overlap(buckets(512), N_STAGES, None)
    for number in range(LEARNED_TOGETHER - 1):
        overlap.note(*ran(number, 1, 0.5, n_prepared=0), 0)
        overlap.learn(is_idle=False)
    assert not overlap.counters()
    overlap.note(*ran(LEARNED_TOGETHER, 1, 0.5, n_prepared=0), 0)
    overlap.learn(is_idle=False)
    assert overlap.counters()["stage_1_compute_seconds_total"] == 0.5 * LEARNED_TOGETHER
    overlap.note(*ran(LEARNED_TOGETHER + 1, 1, 0.5, n_prepared=0), 0)
    overlap.learn(is_idle=True)
    assert overlap.counters()["stage_1_compute_seconds_total"] == 0.5 * (LEARNED_TOGETHER + 1)


def step(number: int, n_rows: int, step_s: float = 0.0, *, is_prompt: bool = False) -> tuple[Running, float]:
    """A step of sequences that decode, or the end of as many prompts, and when its last stage is done."""
    running, _ = ran(number, n_rows, step_s / N_STAGES, n_prepared=0)
    rows = [
        UbatchSequence(f"r{i}", i, i, 1, 100, np.zeros(2, np.int32), is_decode=not is_prompt) for i in range(n_rows)
    ]
    outputs = [Output(i, f"r{i}", OutputKind.SAMPLE, 101) for i in range(n_rows)]
    ubatch = replace(running.ubatch, sequences=tuple(rows), outputs=tuple(outputs))
    return replace(running, ubatch=ubatch), running.marks.submitted_s + step_s


def after_step(step_s: float, n_rows: int = 1, n_groups: int = 1) -> Overlap:
    """The latest step took this long; over two stages, times are such that so many groups are best."""
    overlap = Overlap(buckets(512), N_STAGES, None)
    if n_groups == 2:  # two stages take as long as their rows are many
        for number, n in enumerate((1, 2, 4, 8, 16) * 8):
            overlap.note(*ran(number, n, 0.5 * n, n_prepared=0), 0)
        assert overlap._learned().n_groups(N_STAGES, 8) == 2
    overlap.note(*step(1000, n_rows, step_s), 0)
    return overlap


def ahead(overlap: Overlap, in_flight: list[Running], demand: Demand, n_stages: int = 1) -> bool:
    return overlap.goes_ahead(n_stages, demand, in_flight)


EIGHT = Demand(prompts=(), n_decoding=8)


def test_a_fast_step_goes_ahead_and_a_slow_one_does_not() -> None:
    in_flight = [step(7, 8)[0]]
    assert ahead(after_step(AHEAD_BELOW_S / 2), in_flight, EIGHT)
    assert not ahead(after_step(AHEAD_BELOW_S * 2), in_flight, EIGHT)
    overlap = after_step(AHEAD_BELOW_S * 2)
    overlap.note(*step(1001, 8, AHEAD_BELOW_S / 2), 0)
    assert ahead(overlap, in_flight, EIGHT), "the latest counts"


def test_nothing_goes_ahead_before_a_step_was_seen_and_prompts_are_none() -> None:
    overlap = Overlap(buckets(512), N_STAGES, None)
    assert not ahead(overlap, [step(7, 8)[0]], EIGHT)
    overlap.note(*step(1, 8, 1e-4, is_prompt=True), 0)
    assert not ahead(overlap, [step(7, 8)[0]], EIGHT)
    overlap.note(*step(2, 8, 1e-4), 0)
    overlap.note(*step(3, 8, 100.0, is_prompt=True), 0)
    assert ahead(overlap, [step(7, 8)[0]], EIGHT)


def test_the_time_of_a_step_that_went_ahead_begins_with_its_tokens() -> None:
    overlap = after_step(1e-4)
    waited, now_s = step(8, 8, 100.0)
    waited.marks.submitted_s = now_s - 1e-4  # as `Executor.fill` has it
    overlap.note(waited, now_s, 0)
    assert ahead(overlap, [step(9, 8)[0]], EIGHT)


def test_nobody_goes_ahead_while_somebody_is_ready() -> None:
    overlap = after_step(1e-4)
    in_flight = [step(7, 7)[0]]
    assert not ahead(overlap, in_flight, Demand(prompts=(), n_decoding=8, n_ready=1))
    assert ahead(overlap, in_flight, Demand(prompts=((500, 0),), n_decoding=8)), "it waits for a slot"


def test_over_one_stage_one_group_goes_ahead_and_several_do_not() -> None:
    """Each would have a next step of its own for ever, where one step of all costs hardly more."""
    overlap = after_step(1e-4)
    assert not ahead(overlap, [step(7, 4)[0], step(8, 4)[0]], EIGHT)
    assert not ahead(overlap, [step(7, 9)[0]], EIGHT), "more rows than sequences decode"
    assert not ahead(overlap, [step(6, 0)[0], step(7, 8)[0]], EIGHT), "a part of a prompt is taken next"
    assert ahead(overlap, [step(6, 8)[0], step(7, 0)[0]], EIGHT), "a part of a prompt is no group"


def test_over_two_stages_as_many_groups_go_ahead_as_there_should_be() -> None:
    overlap = after_step(1e-4, n_groups=2)
    assert ahead(overlap, [step(7, 4)[0], step(8, 4)[0]], EIGHT, 2)
    assert not ahead(overlap, [step(7, 5)[0], step(8, 3)[0]], EIGHT, 2), "a group that is too large"
    assert ahead(overlap, [step(8, 3)[0], step(7, 5)[0]], EIGHT, 2), "its turn comes later"
    assert not ahead(overlap, [step(n, n - 5)[0] for n in (6, 7, 8)], EIGHT, 2), "too many groups"
    assert not ahead(overlap, [step(7, 8)[0]], EIGHT, 2)
    assert ahead(overlap, [step(7, 1)[0]], Demand(prompts=(), n_decoding=1), 2)
