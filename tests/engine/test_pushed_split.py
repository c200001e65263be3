"""A model over workers that push to each other: the same bits, whatever way boundaries take, and through losses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from app import fleet
from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.engine.executor import Executor
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.service import Phase
from app.engine.trace import Trace
from app.errors import DeviceLost
from app.recovery import Recovery
from app.rpc.connect import connect
from app.rpc.device import RpcDevice
from app.rpc.worker import Worker, WorkerSettings
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import collect, open_engine, request, tokens_of
from tests.fakes.stack import Stack
from tests.rpc.workers import QUICK, tcp_worker, wait_until

PROMPT = np.random.default_rng(3).integers(0, 256, 90).tolist()
OURS, STOCK = WorkerSettings(), WorkerSettings(extensions=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pushed") / "tiny.gguf"
    return write_tiny_llama(path, TinyLlama(GGMLType.Q4_1, n_layers=4))


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(resources: ExitStack, *settings: WorkerSettings) -> list[Worker]:
    return [resources.enter_context(tcp_worker(NumpyDevice("CPU"), settings=one)) for one in settings]


def far(served: list[Worker]) -> list[Device]:
    return [connect(f"127.0.0.1:{one.port}", first_index=i, timeouts=QUICK)[0] for i, one in enumerate(served)]


def pushes(devices: list[Device]) -> list[int]:
    """How many pushes each device was asked to send."""
    commands = [d.link.dispatcher.counters.commands if isinstance(d, RpcDevice) else {} for d in devices]
    return [counted.get("PUSH", 0) + counted.get("PUSH_TURN", 0) for counted in commands]


@pytest.mark.parametrize(
    ("kinds", "pushing"),
    [
        ((OURS, OURS), (True, False)),
        ((OURS, OURS, OURS), (True, True, False)),
        ((OURS, STOCK, OURS), (False, False, False)),
        ((OURS, OURS, STOCK), (True, False, False)),
        ((None, OURS, OURS), (False, True, False)),
        ((OURS, OURS, None), (True, False, False)),
    ],
    ids=["two", "three", "one stock in between", "stock last", "local first", "local last"],
)
def test_logits_are_the_same_bits_whatever_way_boundaries_take(
    model: Path, resources: ExitStack, kinds: tuple[WorkerSettings | None, ...], pushing: tuple[bool, ...]
) -> None:
    whole = Stack(GGUFFile.open(model), [NumpyDevice("CPU")], cache_type=GGMLType.F32)
    resources.callback(whole.close)
    remote = iter(far(serve(resources, *(kind for kind in kinds if kind is not None))))
    devices: list[Device] = [NumpyDevice("D") if kind is None else next(remote) for kind in kinds]
    split = Stack(GGUFFile.open(model), devices, cache_type=GGMLType.F32)
    resources.callback(split.close)
    assert len(split.stages) == len(kinds)
    for ubatch_size in (90, 16):
        whole.restart()
        split.restart()
        want = whole.feed(PROMPT, every=True, ubatch_size=ubatch_size)
        assert np.array_equal(split.feed(PROMPT, every=True, ubatch_size=ubatch_size), want)
    assert split.greedy([7], 12) == whole.greedy([7], 12)
    assert [n > 0 for n in pushes(devices)] == list(pushing)


def test_an_engine_shows_what_was_pushed(model: Path, resources: ExitStack, tmp_path: Path) -> None:
    devices = far(serve(resources, OURS, OURS))
    trace = Trace(tmp_path / "trace.json")
    engine = open_engine(model, devices, n_ubatch=32, trace=trace)
    asyncio.run(collect(engine, request("a", PROMPT, 4)))
    counters = engine.counters()
    engine.close()
    fleet.close_all(devices)
    assert counters["stage_0_pushed_bytes_total"] == 0 < counters["stage_0_input_bytes_total"]
    assert counters["stage_1_pushed_bytes_total"] == counters["stage_1_input_bytes_total"] > 0
    trace.save()
    moved = [e for e in json.loads(trace.path.read_text())["traceEvents"] if e.get("cat") == "transfer"]
    assert {e["args"]["way"] for e in moved if e["tid"] == 0} <= {"relayed"}
    assert {(e["name"], e["args"]["way"]) for e in moved if e["tid"] == 1} <= {("push", "pushed")}
    assert sum(e["args"]["bytes"] for e in moved if e["tid"] == 1) <= counters["stage_1_pushed_bytes_total"]


def answer(engine: object, id_: str) -> list[int]:
    return tokens_of(asyncio.run(collect(engine, request(id_, PROMPT, 8))))  # type: ignore[arg-type]


def test_a_connection_between_workers_that_breaks_costs_no_worker(model: Path, resources: ExitStack) -> None:
    """Both workers stand, so nothing is loaded again, and the route is tried anew."""
    served = serve(resources, OURS, OURS)
    devices = far(served)
    gguf = GGUFFile.open(model)
    engine = open_engine(model, devices, recovery=Recovery(gguf, fleet.reopen))
    want = answer(engine, "a")
    before = [device.link.dispatcher for device in devices if isinstance(device, RpcDevice)]
    for session in list(served[0]._sessions):
        for outlet in session.routes._outgoing.values():
            outlet.close()
    with pytest.raises(DeviceLost, match="the connection from worker to worker has failed"):
        answer(engine, "b")
    wait_until(lambda: engine.status().phase is Phase.READY)
    assert answer(engine, "c") == want
    assert [d.link.dispatcher for d in devices if isinstance(d, RpcDevice)] == before
    assert engine.counters()["device_losses_total"] == 1
    engine.close()
    fleet.close_all(devices)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_that_dies_comes_back_and_its_neighbours_push_again(
    model: Path, resources: ExitStack, victim: int
) -> None:
    served = serve(resources, OURS, OURS, OURS)
    devices = far(served)
    seen: list[Executor] = []

    class Seen(Executor):
        def connect_stages(self) -> None:
            super().connect_stages()
            seen.append(self)

    engine = open_engine(model, devices, recovery=Recovery(GGUFFile.open(model), fleet.reopen), executor=Seen)
    want = answer(engine, "a")
    port = served[victim].port
    served[victim].close()
    wait_until(lambda: engine.status().phase is not Phase.READY)
    device = NumpyDevice("CPU")
    again = Worker([device], WorkerSettings(port=port))
    again.start()
    resources.callback(device.close)
    resources.callback(again.close)
    wait_until(lambda: engine.status().phase is Phase.READY)
    assert answer(engine, "b") == want
    now = [stage.device for stage in seen[-1].stages]
    assert sum(device is not old for device, old in zip(now, devices, strict=True)) == 1
    assert all(n > 0 for n in pushes(now)[:2])
    engine.close()
    fleet.close_all(now)


def test_a_new_shape_of_a_step_that_waits_for_its_tokens_holds_up_nobody(model: Path, resources: ExitStack) -> None:
    """Devices of a stock worker share a connection: what one of them is asked stands behind what waits for another."""
    worker = resources.enter_context(tcp_worker(NumpyDevice("A"), NumpyDevice("B"), settings=STOCK))
    devices: list[Device] = [*connect(f"127.0.0.1:{worker.port}", timeouts=QUICK)]
    engine = open_engine(model, devices, n_slots=5)

    async def scene() -> list[int]:
        await collect(engine, request("how long a step takes", PROMPT[:9], 4))
        wanted = [request(f"r{n}", PROMPT[: 9 + n], 8 + 4 * n) for n in range(5)]  # ends one by one
        return [len(tokens_of(events)) for events in await asyncio.gather(*(collect(engine, one) for one in wanted))]

    assert asyncio.run(asyncio.wait_for(scene(), 60)) == [8, 12, 16, 20, 24]
    engine.close()
    fleet.close_all(devices)
