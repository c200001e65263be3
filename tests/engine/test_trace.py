"""Marks of ubatches become spans, counters and a trace; times are given, so every figure is exact."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import Future
from pathlib import Path

import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.trace import Span, StageMarks, Timeline, Trace, TracedUbatch, UbatchMarks
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import collect, open_engine, request


def marks(submitted_s: float, *stages: tuple[float | None, float | None]) -> UbatchMarks:
    """(sent, done) of every stage."""
    return UbatchMarks(lambda: 0.0, submitted_s, 1, [StageMarks(None, sent, done) for sent, done in stages])


def test_two_ubatches_over_two_stages() -> None:
    timeline = Timeline()
    first = timeline.take(marks(10, (11, 14), (15, 18)), 18)
    second = timeline.take(marks(10, (11, 17), (17, 21)), 21)
    assert first == (Span(0, 10, 11, 14, 0, False), Span(1, 14, 15, 18, 4, False))
    assert second == (Span(0, 14, 14, 17, 0, True), Span(1, 18, 18, 21, 0, True))
    counters = timeline.counters()
    assert counters["stage_0_compute_seconds_total"] == 6
    assert counters["stage_0_transfer_seconds_total"] == 1
    assert counters["stage_0_bubble_ratio"] == 0
    assert counters["stage_1_compute_seconds_total"] == 6
    assert counters["stage_1_idle_seconds_total"] == 4
    assert counters["stage_1_bubble_ratio"] == pytest.approx(4 / 11)


def test_a_stream_alone_leaves_each_of_two_stages_idle_for_half_of_the_time() -> None:
    timeline = Timeline()
    for step_s in (0, 10, 20, 30):  # the token of each step is drawn for 6 seconds
        timeline.take(marks(step_s, (step_s, step_s + 2), (step_s + 2, step_s + 4)), step_s + 4)
    counters = timeline.counters()
    assert counters["stage_0_idle_seconds_total"] == 6  # what it lacks behind its last step is not known yet
    assert counters["stage_1_idle_seconds_total"] == 8
    assert counters["stage_0_bubble_ratio"] == pytest.approx(6 / 14)
    assert counters["stage_1_bubble_ratio"] == 0.5


def test_waiting_for_requests_is_no_bubble() -> None:
    timeline = Timeline()
    timeline.take(marks(0, (0, 1), (1, 2)), 2)
    timeline.take(marks(100, (100, 101), (101, 102)), 102)
    assert timeline.counters()["stage_0_idle_seconds_total"] == 1
    assert timeline.counters()["stage_1_idle_seconds_total"] == 2


def test_a_stage_that_some_ubatches_do_not_need_is_idle_meanwhile() -> None:
    timeline = Timeline()
    timeline.take(marks(0, (0, 3)), 3)
    timeline.take(marks(10, (10, 13)), 14)
    timeline.take(marks(20, (20, 22), (22, 25)), 25)
    assert timeline.counters()["stage_0_idle_seconds_total"] == 1
    assert timeline.counters()["stage_1_idle_seconds_total"] == 3 + 4 + 2


def test_idle_is_what_is_under_way_less_what_a_stage_does_whatever_overlaps() -> None:
    rng = random.Random(3)
    timeline = Timeline()
    busy: tuple[set[int], ...] = (set(), set(), set())
    under_way: set[int] = set()
    submitted_s = now = 0
    for _ in range(60):
        submitted_s = rng.choice([submitted_s, rng.randint(submitted_s, now), now + rng.randint(0, 30)])
        done_s, ready_s = [], submitted_s
        for stage in busy:
            start_s = max(ready_s, max(stage, default=-1) + 1)
            ready_s = start_s + rng.randint(1, 9)
            stage |= set(range(start_s, ready_s))
            done_s.append((start_s, ready_s))
        now = max(now, ready_s + rng.randint(0, 3))
        under_way |= set(range(submitted_s, now))
        spans = timeline.take(marks(submitted_s, *done_s), now)
        assert min(span.idle_s for span in spans) >= 0
    counters = timeline.counters()
    for number, stage in enumerate(busy):
        idle = {at for at in under_way - stage if at < max(stage)}
        assert counters[f"stage_{number}_compute_seconds_total"] == len(stage)
        assert counters[f"stage_{number}_idle_seconds_total"] == len(idle) > 0


def test_a_mark_that_is_not_there_yet_counts_as_now() -> None:
    (span,) = Timeline().take(marks(0, (None, None)), 5)
    assert span == Span(0, 0, 0, 5, 0, False)


def test_marks_are_set_by_futures() -> None:
    now = [1.0]
    taken = UbatchMarks(lambda: now[0], 0.5, 3)
    mark = taken.next_stage()
    sent, done = Future[None](), Future[None]()
    sent.add_done_callback(taken.on_sent(mark))
    done.add_done_callback(taken.on_done(mark))
    sent.set_result(None)
    now[0] = 2.0
    done.set_result(None)
    assert mark == StageMarks(0.5, 1.0, 2.0)
    assert taken.next_stage().ready_s is None


def test_a_trace_is_what_chrome_reads(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.stage_names = ["CPU layers 0-1"]
    trace.add(TracedUbatch(7, 1, 30, ("a", "b"), 5.0, 5.5, (Span(0, 5.0, 5.1, 5.4, 0.0, False),)))
    trace.add(TracedUbatch(8, 2, 0, ("a", "b"), 5.5, 6.0, (Span(0, 5.5, 5.5, 6.0, 0.0, False),)))
    trace.save()
    events = json.loads(trace.path.read_text())["traceEvents"]
    assert events[0]["args"] == {"name": "CPU layers 0-1"}
    whole = [(e["cat"], e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X"]
    assert whole == [
        ("transfer", "transfer", 0, 100_000),
        ("compute", "prompt 30 + decode 1", 100_000, 300_000),
        ("compute", "decode 2", 500_000, 500_000),
    ]
    arcs = [(e["ph"], e["cat"], e["id"], round(e["ts"])) for e in events if e["ph"] in "be"]
    assert arcs == [
        ("b", "ubatch", 7, 0),
        ("e", "ubatch", 7, 500_000),
        ("b", "decode group", 8, 500_000),
        ("e", "decode group", 8, 1_000_000),
    ]


def test_an_engine_counts_and_traces_every_stage(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama())
    devices = [NumpyDevice("A", n_threads=1), NumpyDevice("B", n_threads=1)]
    trace = Trace(tmp_path / "trace.json")
    engine = open_engine(path, devices, n_ubatch=16, trace=trace)
    asyncio.run(collect(engine, request("one", range(40, 80), 4)))
    counters = engine.counters()
    engine.close()
    for stage in (0, 1):
        assert counters[f"stage_{stage}_compute_seconds_total"] > 0
        assert 0 < counters[f"stage_{stage}_bubble_ratio"] < 1
    trace.save()
    events = json.loads(trace.path.read_text())["traceEvents"]
    n_ubatches = len([e for e in events if e["ph"] == "b"])
    assert n_ubatches == counters["ubatches_total"] >= 6
    assert sum(e["args"]["prompt_rows"] for e in events if e["ph"] == "b") == 40
    assert {e["tid"] for e in events if e.get("cat") == "compute"} == {0, 1}
    for device in devices:
        device.close()
