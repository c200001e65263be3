"""GET /metrics: well-formed text, a meaning for every name, and what went to each worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.api.app import create_app
from app.api.metrics import SERVING, help_of
from app.api.options import ApiOptions
from app.engine.connection import ConnectionStats
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.request import Delta, SamplingParams
from app.errors import DeviceLost
from app.rpc.device import RpcDevice
from tests.api.conftest import client_for
from tests.api.support import CHAT, HI
from tests.fakes.engine import FakeEngine
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import collect, open_engine, request
from tests.rpc.workers import remote

METRICS = ApiOptions(enable_metrics=True)
SAMPLE = re.compile(r'([a-z_0-9]+)((?:\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+\})?) (\S+)')


def connection(number: int, endpoint: str, **changes: object) -> ConnectionStats:
    told: dict[str, object] = {
        "is_up": True,
        "commands": {"GRAPH_RUN": 2, "PING": 1},
        "sent_bytes": 100,
        "received_bytes": 10,
        "answers": 3,
        "round_trip_s": 0.5,
        "round_trips": (0, 0, 0, 0, 1, 0, 2, *[0] * 25),
        "queued": 4,
        "in_flight": 5,
    }
    return ConnectionStats(number=number, endpoint=endpoint, **(told | changes))  # type: ignore[arg-type]


def parsed(text: str) -> dict[str, float]:
    """Values by name and labels. Checks that every family is one block that begins with HELP and TYPE."""
    values: dict[str, float] = {}
    family = ""
    families = []
    lines = iter(text.removesuffix("\n").split("\n"))
    for line in lines:
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
            families.append(family)
            assert next(lines).split(" ")[:3] == ["#", "TYPE", family]
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert re.fullmatch(f"{family}(_bucket|_sum|_count)?", match[1])
        assert match[1] + match[2] not in values
        values[match[1] + match[2]] = float(match[3])
    assert len(set(families)) == len(families)
    return values


async def told(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(response.text)


async def test_a_server_without_workers() -> None:
    async with client_for(FakeEngine(), METRICS) as client:
        text = (await client.get("/metrics")).text
    assert text == (
        "# HELP tandem_requests_total requests that were admitted\n"
        "# TYPE tandem_requests_total counter\ntandem_requests_total 0\n"
    )


async def test_what_went_to_each_worker_is_added_up() -> None:
    engine = FakeEngine()
    engine.connected = [connection(1, "a:1"), connection(2, "a:1", is_up=False), connection(3, "b:2", commands={})]
    async with client_for(engine, METRICS) as client:
        values = await told(client)
    assert values['tandem_worker_connections{endpoint="a:1"}'] == 1
    assert values['tandem_worker_sent_bytes_total{endpoint="a:1"}'] == 200
    assert values['tandem_worker_received_bytes_total{endpoint="b:2"}'] == 10
    assert values['tandem_worker_commands_queued{endpoint="a:1"}'] == 8
    assert values['tandem_worker_commands_in_flight{endpoint="b:2"}'] == 5
    assert values['tandem_worker_commands_total{endpoint="a:1",command="GRAPH_RUN"}'] == 4
    assert not any('endpoint="b:2",command' in name for name in values)
    bucket = 'tandem_worker_round_trip_seconds_bucket{endpoint="b:2",le="%s"}'
    buckets = [values[bucket % le] for le in ("1.6e-05", "6.4e-05", "+Inf")]
    assert buckets == [1, 3, 3]
    assert values['tandem_worker_round_trip_seconds_sum{endpoint="b:2"}'] == 0.5
    assert values['tandem_worker_round_trip_seconds_count{endpoint="b:2"}'] == 3


async def test_labels_are_escaped() -> None:
    engine = FakeEngine()
    engine.connected = [connection(1, 'a"b\\c\n')]
    async with client_for(engine, METRICS) as client:
        values = await told(client)
    assert values['tandem_worker_sent_bytes_total{endpoint="a\\"b\\\\c\\n"}'] == 100


@pytest.fixture
def device() -> Iterator[RpcDevice]:
    with remote(NumpyDevice("CPU")) as device:
        yield device


@pytest.fixture
def engine_over_worker(tmp_path: Path, device: RpcDevice) -> Iterator[Engine]:
    engine = open_engine(write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama()), [device])
    yield engine
    engine.close()


LONG = request("long", [1, 2, 3], 400, sampling=SamplingParams(temperature=0, ignore_eos=True))


async def test_a_real_engine_over_a_worker(engine_over_worker: Engine, device: RpcDevice) -> None:
    await collect(engine_over_worker, request("a", [1, 2, 3]))
    transport = httpx.ASGITransport(create_app(engine_over_worker, METRICS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        values = await told(client)
    assert set(SERVING) <= set(engine_over_worker.counters())
    for name in engine_over_worker.counters():
        assert help_of(name) != name and f"tandem_{name}" in values
    worker = f'{{endpoint="{device.link.endpoint}"}}'
    assert values[f"tandem_worker_connections{worker}"] == 1
    assert values[f"tandem_worker_sent_bytes_total{worker}"] > values[f"tandem_worker_received_bytes_total{worker}"] > 0
    assert values[f"tandem_worker_round_trip_seconds_count{worker}"] > 0


async def test_requests_that_end_with_a_worker_are_counted(engine_over_worker: Engine, device: RpcDevice) -> None:
    with pytest.raises(DeviceLost):
        async for event in engine_over_worker.submit(LONG):
            if isinstance(event, Delta):
                device.link.dispatcher.lose("cut")
    counters = engine_over_worker.counters()
    ended = {kind: counters[f"requests_{kind}_total"] for kind in ("stop", "length", "abort", "lost", "failed")}
    assert ended == {"stop": 0, "length": 0, "abort": 0, "lost": 1, "failed": 0}
    (stats,) = engine_over_worker.connections()
    assert not stats.is_up


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_that_failed_has_a_line_in_the_log(streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.fail_with, engine.fail_after = DeviceLost("w1:1", "reset"), 2
    async with client_for(engine) as client:
        await client.post(CHAT, json={"messages": HI, "stream": streamed})
    (line,) = [record for record in caplog.records if record.getMessage().startswith("not answered")]
    assert "w1:1" in line.getMessage()
    assert vars(line)["error"] == "DeviceLost" and vars(line)["id"].startswith("chatcmpl-")
