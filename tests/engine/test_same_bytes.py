"""The promise: a request gets the same bytes alone and in a crowd, whatever the ubatches, caches, threads and devices.

Outputs are compared by token, and logits bit for bit through the log-probabilities of every token. Run on the native
CPU device, whose kernels give each output element one order of accumulation; the numpy device promises less.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.device import Device
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from app.engine.request import GenerateRequest, SamplingParams, TokenInfo
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import collect, open_engine, request
from tests.rpc.workers import remote

cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")

Answer = list[tuple[int, float | None]]
#: More cells than the requests need together, so that nobody is preempted unless a test wants it.
ROOMY = 4096


@pytest.fixture(scope="module", params=[GGMLType.Q4_1, GGMLType.Q4_K, GGMLType.F16], ids=lambda t: t.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("same") / f"{request.param.name}.gguf"
    return write_tiny_llama(path, TinyLlama.of_type(request.param, n_layers=3, n_heads=2, n_kv_heads=1))


def local(n_devices: int, n_threads: int = 1) -> Callable[[ExitStack], list[Device]]:
    def open_(stack: ExitStack) -> list[Device]:
        devices: list[Device] = [cpu.CpuDevice(f"D{i}", n_threads) for i in range(n_devices)]
        for device in devices:
            stack.callback(device.close)
        return devices

    return open_


def mixed(stack: ExitStack) -> list[Device]:
    """A local stage and one behind the wire."""
    far = stack.enter_context(remote(cpu.CpuDevice("far", 2)))
    return [*ONE(stack), far]


ONE = local(1)


@contextmanager
def serving(model: Path, devices: Callable[[ExitStack], list[Device]] = ONE, **sizes: object) -> Iterator[Engine]:
    with ExitStack() as stack:
        sizes = {"n_slots": 4, "max_queue": 64, "ctx_size": ROOMY, **sizes}
        engine = open_engine(model, devices(stack), **sizes)  # type: ignore[arg-type]
        stack.callback(engine.check_integrity)
        stack.callback(engine.close)
        yield engine


def crowd(n: int = 10, seed: int = 7, longest: int = 150) -> list[GenerateRequest]:
    """Requests of many lengths, some with a shared beginning, some greedy and some seeded."""
    rng = random.Random(seed)
    shared = [rng.randrange(33, 120) for _ in range(100)]
    wanted = []
    for number in range(n):
        own = [rng.randrange(33, 120) for _ in range(rng.choice([1, 2, 5, 17, 63, 64, 65, longest]))]
        prompt = shared[: rng.choice([0, 0, 64, 70, 100])] + own
        temperature = rng.choice([0.0, 1.3])
        sampling = SamplingParams(temperature=temperature, seed=number, n_logprobs=0, ignore_eos=True, top_k=20)
        wanted.append(request(f"r{number}", prompt, rng.randint(4, 14), sampling=sampling))
    return wanted


def answer_of(events: Sequence[object]) -> Answer:
    infos: list[TokenInfo] = [info for event in events for info in getattr(event, "tokens", ())]
    return [(info.token, info.logprob) for info in infos]


def answers(engine: Engine, wanted: Sequence[GenerateRequest]) -> dict[str, Answer]:
    """All at once."""

    async def scene() -> dict[str, Answer]:
        events = await asyncio.gather(*(collect(engine, one) for one in wanted))
        return {one.id: answer_of(got) for one, got in zip(wanted, events, strict=True)}

    return asyncio.run(scene())


def alone(engine: Engine, wanted: Sequence[GenerateRequest]) -> dict[str, Answer]:
    """One after another, each cold."""
    together: dict[str, Answer] = {}
    for one in wanted:
        together.update(answers(engine, [replace(one, cache_prompt=False)]))
    return together


@pytest.fixture(scope="module")
def want(model: Path) -> dict[str, Answer]:
    with serving(model) as engine:
        return alone(engine, crowd())


def test_a_crowd_gets_what_each_gets_alone_cold_and_warm(model: Path, want: dict[str, Answer]) -> None:
    with serving(model) as engine:
        assert answers(engine, crowd()) == want
        assert answers(engine, crowd()[::-1]) == want
        assert engine.counters()["cached_tokens_total"] > 0
        assert alone(engine, crowd()) == want


@pytest.mark.parametrize("n_ubatch", [1, 7, 64, 512])
def test_the_size_of_ubatches_does_not_matter(model: Path, want: dict[str, Answer], n_ubatch: int) -> None:
    with serving(model, n_ubatch=n_ubatch) as engine:
        assert answers(engine, crowd()) == want


@pytest.mark.parametrize(
    "devices",
    [local(1, 2), local(1, 4), local(2), local(3, 2), mixed],
    ids=["2 threads", "4 threads", "2 devices", "3 devices", "local and remote"],
)
def test_threads_and_devices_do_not_matter(
    model: Path, want: dict[str, Answer], devices: Callable[[ExitStack], list[Device]]
) -> None:
    with serving(model, devices, max_in_flight=4) as engine:
        assert answers(engine, crowd()) == want


def test_preemption_and_compaction_do_not_matter(model: Path) -> None:
    growing = [replace(one, max_tokens=110) for one in crowd(5, seed=3, longest=30)]
    with serving(model) as engine:
        expected = alone(engine, growing)
    with serving(model, ctx_size=512, n_ubatch=48, max_in_flight=3) as engine:
        for round_ in range(2):
            assert answers(engine, growing[:: (-1) ** round_]) == expected
        counters = engine.counters()
        assert counters["preemptions_total"] > 0 and counters["blocks_moved_total"] > 0


@pytest.mark.parametrize("cache_type", ["q8_0", "bf16", "f32", "q4_0"])
def test_the_type_of_the_cache_changes_answers_but_not_the_promise(model: Path, cache_type: str) -> None:
    with serving(model, cache_type=cache_type) as engine:
        expected = alone(engine, crowd(6))
        assert answers(engine, crowd(6)) == expected
    with serving(model, local(2, 2), cache_type=cache_type, n_ubatch=7, ctx_size=512) as engine:
        assert answers(engine, crowd(6)) == expected
