"""A crowd of requests for an engine over native devices, and what each of them gets alone, cold."""

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
from app.engine.request import GenerateRequest, SamplingParams, TokenInfo
from tests.fakes.serving import collect, open_engine, request
from tests.rpc.workers import remote

cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")

Answer = list[tuple[int, float | None]]
#: More cells than the requests need together, so that nobody is preempted unless a test wants it.
ROOMY = 4096


def local(n_devices: int, n_threads: int = 1) -> Callable[[ExitStack], list[Device]]:
    def open_(stack: ExitStack) -> list[Device]:
        devices: list[Device] = [cpu.CpuDevice(f"D{i}", n_threads) for i in range(n_devices)]
        for device in devices:
            stack.callback(device.close)
        return devices

    return open_


class KeepsRows(cpu.CpuDevice):  # type: ignore[misc, name-defined]
    """Hands out rows whole, as a stock worker does."""

    selects_rows = False


def keeping_rows(stack: ExitStack) -> list[Device]:
    device: Device = KeepsRows("D0", 1)
    stack.callback(device.close)
    return [device]


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
