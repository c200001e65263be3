"""When every stage got, began and finished every ubatch, as the control plane sees it. Pure: times are given.

A stage's answer proves that it has finished, so its busy time includes the answer's way back. From the marks of
finished ubatches come the counters of each stage, samples for pacing, and, if wanted, a trace in Chrome's format.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A trace keeps the latest ubatches; a longer run would fill memory.
MAX_TRACED = 100_000

_US = 1e6


@dataclass(slots=True)
class StageMarks:
    """Seconds on the engine's clock: the input was there, had left for the device, the output was there.

    A pushed input has left when the device has it; a pushed output is there when it has left.
    """

    ready_s: float | None = None
    sent_s: float | None = None
    done_s: float | None = None
    input_bytes: int = 0
    way: str = "relayed"


@dataclass(slots=True)
class UbatchMarks:
    """One ubatch's way over the stages. The marks are set by lanes' threads, each once."""

    clock: Callable[[], float]
    submitted_s: float
    n_rows: int
    stages: list[StageMarks] = field(default_factory=list)

    def next_stage(self, input_bytes: int = 0, way: str = "relayed") -> StageMarks:
        """Marks of the stage that is about to be given the ubatch; its input is the output of the one before."""
        ready_s = None if self.stages else self.submitted_s
        marks = StageMarks(ready_s, input_bytes=input_bytes, way=way)
        self.stages.append(marks)
        return marks

    def on_sent(self, marks: StageMarks) -> Callable[[Future[Any]], None]:
        """The value of a future may be how many seconds ago it was."""

        def note(sent: Future[Any]) -> None:
            known = not sent.cancelled() and sent.exception() is None
            marks.sent_s = self.clock() - (known and sent.result() or 0.0)

        return note

    def on_done(self, marks: StageMarks) -> Callable[[Future[Any]], None]:
        def note(_: Future[Any]) -> None:
            marks.done_s = self.clock()

        return note


@dataclass(frozen=True, slots=True)
class Span:
    """What one stage did for one ubatch: the input's way from `start_s` on, then computing.

    `idle_s`: how long it had nothing to do since its ubatch before, while any ubatch was under way. `queued`: the input
    was there before the stage was free, so nothing but the stage itself took time.
    """

    stage: int
    start_s: float
    sent_s: float
    done_s: float
    idle_s: float
    queued: bool
    input_bytes: int = 0
    way: str = "relayed"

    @property
    def busy_s(self) -> float:
        return self.done_s - self.start_s


@dataclass(frozen=True, slots=True)
class TracedUbatch:
    """A finished ubatch for the trace."""

    number: int
    n_decode: int
    n_prompt: int
    requests: tuple[str, ...]
    submitted_s: float
    taken_s: float
    spans: tuple[Span, ...]


@dataclass(slots=True)
class StageTotals:
    """Seconds since the start, those of idleness up to the stage's latest ubatch; and bytes."""

    compute_s: float = 0.0
    transfer_s: float = 0.0
    idle_s: float = 0.0
    input_bytes: int = 0
    pushed_bytes: int = 0

    @property
    def bubble_ratio(self) -> float:
        whole_s = self.compute_s + self.transfer_s + self.idle_s
        return self.idle_s / whole_s if whole_s else 0.0

    def add(self, span: Span) -> None:
        self.transfer_s += span.sent_s - span.start_s
        self.compute_s += span.done_s - span.sent_s
        self.idle_s += span.idle_s
        self.input_bytes += span.input_bytes
        self.pushed_bytes += span.input_bytes if span.way == "pushed" else 0


@dataclass(slots=True)
class _Stage:
    """Where a stage stands: free since when, and how long the engine had rested by then."""

    free_s: float
    rested_s: float = 0.0
    totals: StageTotals = field(default_factory=StageTotals)


class Timeline:
    """Turns marks into spans and totals. Used by the engine's thread alone.

    A ubatch is under way from its submission until it is taken. While none is, the engine rests, and so may its stages.
    """

    def __init__(self) -> None:
        self._stages: list[_Stage] = []
        self._began_s = 0.0
        self._taken_s = 0.0
        self._rested_s = 0.0

    def take(self, marks: UbatchMarks, now_s: float) -> tuple[Span, ...]:
        """The spans of a ubatch that has run; ubatches come in the order in which they were submitted."""
        if not self._stages:
            self._began_s = self._taken_s = marks.submitted_s
        self._rested_s += max(0.0, marks.submitted_s - self._taken_s)
        self._taken_s = max(self._taken_s, now_s)
        spans = []
        ready_s = marks.submitted_s
        for number, mark in enumerate(marks.stages):
            if number == len(self._stages):
                self._stages.append(_Stage(self._began_s))
            stage = self._stages[number]
            done_s = max(ready_s, now_s if mark.done_s is None else mark.done_s)
            free_s = stage.free_s
            start_s = max(ready_s, free_s)
            done_s = max(done_s, start_s)
            sent_s = min(max(start_s, start_s if mark.sent_s is None else mark.sent_s), done_s)
            # its latest ubatch was taken after it had ended here, so all rests since were when this stage was free
            idle_s = max(0.0, start_s - free_s - (self._rested_s - stage.rested_s))
            span = Span(number, start_s, sent_s, done_s, idle_s, free_s > ready_s, mark.input_bytes, mark.way)
            stage.totals.add(span)
            stage.free_s, stage.rested_s = done_s, self._rested_s
            spans.append(span)
            ready_s = done_s
        return tuple(spans)

    def counters(self) -> dict[str, float]:
        """By stage: seconds of computing, of the input's way there, idle; the idle share of all three; bytes."""
        counters: dict[str, float] = {}
        for number, stage in enumerate(self._stages):
            totals = stage.totals
            counters[f"stage_{number}_compute_seconds_total"] = totals.compute_s
            counters[f"stage_{number}_transfer_seconds_total"] = totals.transfer_s
            counters[f"stage_{number}_idle_seconds_total"] = totals.idle_s
            counters[f"stage_{number}_bubble_ratio"] = totals.bubble_ratio
            counters[f"stage_{number}_input_bytes_total"] = float(totals.input_bytes)
            counters[f"stage_{number}_pushed_bytes_total"] = float(totals.pushed_bytes)
        return counters


class Trace:
    """The latest ubatches in Chrome's trace format, which Perfetto and chrome://tracing show."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stage_names: Sequence[str] = ()
        self._ubatches: deque[TracedUbatch] = deque(maxlen=MAX_TRACED)

    def add(self, ubatch: TracedUbatch) -> None:
        self._ubatches.append(ubatch)

    def check(self) -> None:
        """Find out now whether the file can be written. Raises OSError."""
        with self.path.open("a", encoding="utf-8"):
            pass

    def save(self) -> None:
        """Write the file. Raises OSError."""
        ubatches = list(self._ubatches)
        with self.path.open("w", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(trace_events(ubatches, self.stage_names))}, file)


def trace_events(ubatches: Sequence[TracedUbatch], stage_names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Events in microseconds from the first submission: a track per stage, and an arc per ubatch or decode group."""
    origin_s = ubatches[0].submitted_s if ubatches else 0.0
    for number, name in enumerate(stage_names):
        yield {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
    for ubatch in ubatches:
        name = _name(ubatch)
        args = {"ubatch": ubatch.number, "prompt_rows": ubatch.n_prompt, "decode_rows": ubatch.n_decode}
        for span in ubatch.spans:
            whole = {"ph": "X", "pid": 1, "tid": span.stage, "args": args}
            if span.sent_s > span.start_s:
                times = _times(span.start_s - origin_s, span.sent_s - span.start_s)
                transfer = {"cat": "transfer", "name": "push" if span.way == "pushed" else "transfer"}
                yield {**whole, **transfer, "args": {**args, "bytes": span.input_bytes, "way": span.way}, **times}
            yield {**whole, "cat": "compute", "name": name, **_times(span.sent_s - origin_s, span.done_s - span.sent_s)}
        arc = {"pid": 1, "tid": 0, "id": ubatch.number, "name": name}
        arc["cat"] = "ubatch" if ubatch.n_prompt else "decode group"
        begin_us, end_us = ((at - origin_s) * _US for at in (ubatch.submitted_s, ubatch.taken_s))
        yield {**arc, "ph": "b", "ts": begin_us, "args": {**args, "requests": ubatch.requests}}
        yield {**arc, "ph": "e", "ts": end_us}


def _name(ubatch: TracedUbatch) -> str:
    if not ubatch.n_prompt:
        return f"decode {ubatch.n_decode}"
    return f"prompt {ubatch.n_prompt}" + (f" + decode {ubatch.n_decode}" if ubatch.n_decode else "")


def _times(start_s: float, duration_s: float) -> dict[str, float]:
    return {"ts": start_s * _US, "dur": duration_s * _US}
