"""What is learned from ubatches that have run, and what is not; times are given."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from app.engine.buckets import buckets
from app.engine.executor import Running
from app.engine.overlap import LEARNED_TOGETHER, Overlap
from app.engine.serving.types import Demand, Ubatch
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
