"""Devices that fail or are lost while a step waits for its tokens: requests end, lanes go on, and the engine serves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from app import fleet
from app.engine.device import Device, Handle
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.executor import Executor
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.request import GenerateRequest, SamplingParams
from app.engine.service import Phase
from app.engine.serving.types import Ubatch
from app.errors import DeadlineExceeded, DeviceError, DeviceLost, InternalError, NotReady
from app.recovery import Recovery
from app.rpc.connect import connect
from app.rpc.worker import Worker, WorkerSettings
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import collect, finished, open_engine, request, tokens_of
from tests.fakes.watched import Watched, go_ahead, watched
from tests.rpc.workers import QUICK, tcp_worker, wait_until

WAIT_S = 30.0
PROMPT = np.random.default_rng(11).integers(33, 120, 40).tolist()
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, n_logprobs=0)


class Failing(NumpyDevice):
    """Fails in its lane, or in the thread that calls it, for as long as it is told what with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.in_lane: Exception | None = None
        self.at_once: Exception | None = None

    def run(self, handle: Handle) -> None:
        if self.at_once is not None:
            raise self.at_once
        if (error := self.in_lane) is not None:
            self._lane.submit(lambda: self._raise(error))
        super().run(handle)

    @staticmethod
    def _raise(error: Exception) -> None:
        raise error


def lost(device: Failing) -> Exception:
    return DeviceLost(device.name, "the cable was pulled", command="GRAPH_COMPUTE")


def failed(device: Failing) -> Exception:
    return DeviceError(f"device {device.name} is ill")


def bug(device: Failing) -> Exception:
    return KeyError(f"a bug of {device.name}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("losses") / "tiny.gguf", TinyLlama(GGMLType.Q8_0))


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    go_ahead(monkeypatch, always=True)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(model: Path, resources: ExitStack, n_devices: int) -> tuple[Engine, list[Failing]]:
    devices = [Failing(f"D{i}") for i in range(n_devices)]
    for device in devices:
        resources.callback(device.close)
    engine = open_engine(
        model, devices, n_slots=3, ctx_size=1024, recovery=lambda executor, lost, tell: executor, executor=Watched
    )
    resources.callback(engine.check_integrity)
    resources.callback(engine.close)
    return engine, devices


def wanted(prefix: str, n_tokens: int = 40) -> list[GenerateRequest]:
    return [request(f"{prefix}{i}", PROMPT[i:], n_tokens, sampling=SAMPLING) for i in range(3)]


def run(engine: Engine, requests: list[GenerateRequest]) -> list[object]:
    """What becomes of each, answers as their tokens. Whoever hears nothing any more fails the test."""

    async def scene() -> list[object]:
        runs = asyncio.gather(*(collect(engine, one) for one in requests), return_exceptions=True)
        got = await asyncio.wait_for(runs, WAIT_S)
        return [one if isinstance(one, BaseException) else tokens_of(one) for one in got]

    return asyncio.run(scene())


def at_step_ahead(engine: Engine, number: int, act: Callable[[], None]) -> None:
    """Do something right before the so-manieth step goes ahead of its tokens."""
    executor = watched(engine)
    n_before = executor.n_ahead

    def before(ubatch: Ubatch) -> None:
        if ubatch.follows is not None and executor.n_ahead - n_before == number:
            act()

    executor.before_submit = before


def until_ready(engine: Engine) -> None:
    wait_until(lambda: engine.status().phase is Phase.READY)


@pytest.mark.parametrize(("n_devices", "victim"), [(1, 0), (2, 0), (2, 1), (3, 1)], ids=str)
@pytest.mark.parametrize(("how", "kind"), [(lost, DeviceLost), (failed, DeviceError)], ids=["lost", "failed"])
def test_a_device_that_fails_in_its_lane_ends_every_request_and_the_engine_serves_again(
    model: Path,
    resources: ExitStack,
    n_devices: int,
    victim: int,
    how: Callable[[Failing], Exception],
    kind: type[Exception],
) -> None:
    """The step that fails has a follower in the lanes of all devices, which waits for tokens that never come."""
    engine, devices = serve(model, resources, n_devices)
    want = run(engine, wanted("before"))
    assert all(isinstance(one, list) and len(one) == 40 for one in want) and watched(engine).n_ahead > 30

    def break_() -> None:
        devices[victim].in_lane = how(devices[victim])

    at_step_ahead(engine, 5, break_)
    for error in run(engine, wanted("during")):
        assert type(error) is kind, error
    devices[victim].in_lane = None
    until_ready(engine)
    watched(engine).before_submit = lambda ubatch: None
    assert run(engine, wanted("after")) == want
    assert engine.counters()["requests_in_flight"] == 0


@pytest.mark.parametrize(("n_devices", "victim"), [(1, 0), (2, 0), (2, 1), (3, 1)], ids=str)
@pytest.mark.parametrize(("how", "kind"), [(lost, DeviceLost), (bug, InternalError)], ids=["lost", "bug"])
def test_a_stage_that_raises_while_a_step_ahead_is_submitted_leaves_no_lane_waiting(
    model: Path,
    resources: ExitStack,
    n_devices: int,
    victim: int,
    how: Callable[[Failing], Exception],
    kind: type[Exception],
) -> None:
    """The stages before it have the step already; nobody will ever fill it in."""
    engine, devices = serve(model, resources, n_devices)
    want = run(engine, wanted("before"))

    def break_() -> None:
        devices[victim].at_once = how(devices[victim])

    at_step_ahead(engine, 5, break_)
    for error in run(engine, wanted("during")):
        assert type(error) is kind, error
    devices[victim].at_once = None
    until_ready(engine)
    watched(engine).before_submit = lambda ubatch: None
    assert run(engine, wanted("after")) == want


def test_a_bug_in_the_middle_of_a_submission_leaves_no_stage_with_a_mask_of_before(
    model: Path, resources: ExitStack
) -> None:
    """The second stage was not reached; what its mask is thought to be it never was."""
    engine, devices = serve(model, resources, 2)

    def one(id_: str) -> object:
        events = asyncio.run(collect(engine, request(id_, PROMPT[:1], 1, sampling=SAMPLING, cache_prompt=False)))
        return [info.logprob for event in events for info in getattr(event, "tokens", ())]

    want = one("before")
    run(engine, [request("long", PROMPT[:1], 30, sampling=SAMPLING, cache_prompt=False)])
    devices[0].at_once = bug(devices[0])
    with pytest.raises(InternalError):
        one("during")
    devices[0].at_once = None
    assert one("after") == want


def test_closing_while_a_step_waits_for_its_tokens_ends_requests_and_lanes(model: Path) -> None:
    class Gated(NumpyDevice):
        """Computes no more once it is told to hold."""

        def __init__(self) -> None:
            super().__init__("G")
            self.go = threading.Event()
            self.go.set()

        def run(self, handle: Handle) -> None:
            self._lane.submit(lambda: self.go.wait(WAIT_S))
            super().run(handle)

    device = Gated()
    engine = open_engine(model, [device], executor=Watched)
    waits = threading.Event()

    def hold() -> None:
        device.go.clear()
        waits.set()

    at_step_ahead(engine, 3, hold)

    async def scene() -> None:
        stream = engine.submit(request("a", PROMPT, 40, sampling=SAMPLING))
        await asyncio.to_thread(waits.wait, WAIT_S)
        await asyncio.to_thread(engine.close)
        with pytest.raises(NotReady, match="shutting down"):
            async for _ in stream:
                pass

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))
    last = device.record()
    device.go.set()
    last.result(WAIT_S)  # the lane waits for nothing
    device.close()


def test_an_abort_of_all_while_a_step_waits_lets_it_run_in_vain(model: Path, resources: ExitStack) -> None:
    engine, _ = serve(model, resources, 2)
    want = run(engine, wanted("before"))
    at_step_ahead(engine, 4, lambda: [engine.abort(f"during{i}") for i in range(3)] and None)
    for tokens in run(engine, wanted("during")):
        assert isinstance(tokens, list) and 0 < len(tokens) < 40
    watched(engine).before_submit = lambda ubatch: None
    assert run(engine, wanted("after")) == want


def test_deadlines_end_requests_whose_next_step_is_ahead(model: Path, resources: ExitStack) -> None:
    engine, _ = serve(model, resources, 1)
    later_s = [0.0]
    engine._clock = lambda: time.monotonic() + later_s[0]
    at_step_ahead(engine, 4, lambda: later_s.append(later_s.pop() + 100.0))
    late = request("late", PROMPT, 40, sampling=SAMPLING, deadline_s=50.0)
    assert isinstance(run(engine, [late])[0], DeadlineExceeded)
    assert engine.counters()["requests_in_flight"] == 0
    watched(engine).before_submit = lambda ubatch: None
    assert len(run(engine, wanted("after"))) == 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_while_a_step_waits_comes_back(model: Path, resources: ExitStack, victim: int) -> None:
    """Over two workers that push; the other one has the step that waits, and goes on with it."""
    served = [resources.enter_context(tcp_worker(NumpyDevice("CPU"))) for _ in range(2)]
    devices: list[Device] = [
        connect(f"127.0.0.1:{one.port}", first_index=i, timeouts=QUICK)[0] for i, one in enumerate(served)
    ]
    executors: list[Executor] = []

    class Seen(Watched):
        def connect_stages(self) -> None:
            super().connect_stages()
            executors.append(self)

    recovery = Recovery(GGUFFile.open(model), fleet.reopen)
    engine = open_engine(model, devices, n_slots=3, ctx_size=1024, recovery=recovery, executor=Seen)
    want = run(engine, wanted("before"))
    port = served[victim].port
    at_step_ahead(engine, 5, served[victim].close)
    for error in run(engine, wanted("during", 200)):
        assert isinstance(error, DeviceLost), error
    device = NumpyDevice("CPU")
    again = Worker([device], WorkerSettings(port=port))
    again.start()
    resources.callback(device.close)
    resources.callback(again.close)
    until_ready(engine)
    watched(engine).before_submit = lambda ubatch: None
    assert run(engine, wanted("after")) == want
    engine.close()
    engine.check_integrity()
    fleet.close_all([stage.device for stage in executors[-1].stages])


def test_the_step_that_follows_gets_the_tokens_that_were_drawn(model: Path, resources: ExitStack) -> None:
    """Filled in once each, in order, and with zeros for whoever stopped."""
    engine, _ = serve(model, resources, 1)
    filled: list[tuple[int, list[int]]] = []
    executor = watched(engine)
    fill = executor.fill

    def note(running: object, tokens: list[int]) -> None:
        ubatch: Ubatch = running.ubatch  # type: ignore[attr-defined]
        filled.append((ubatch.id, list(tokens)))
        fill(running, tokens)  # type: ignore[arg-type]

    executor.fill = note  # type: ignore[method-assign, assignment]
    events = asyncio.run(collect(engine, request("a", PROMPT, 12, sampling=SAMPLING)))
    assert finished(events).completion_tokens == 12
    ids = [ubatch.id for ubatch in executor.submitted if ubatch.follows is not None]
    assert [id_ for id_, _ in filled] == ids
    assert [tokens for _, tokens in filled] == [[token] for token in tokens_of(events)[1:11]]
