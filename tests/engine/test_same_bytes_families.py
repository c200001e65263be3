"""The promise of the same bytes, for models with recurrent state, snapshots of it, and experts."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.device import Device
from app.engine.request import GenerateRequest, SamplingParams
from tests.fakes.crowd import Answer, alone, answers, crowd, local, mixed, serving
from tests.fakes.serving import request
from tests.support import goldens_dir

#: Where prompts of the crowd may be cut; some of them share what is before.
STARTS = (20, 64, 70, 100)


@pytest.fixture(scope="module", params=["qwen35-Q4_K_M", "qwen35moe-Q4_K_M", "qwen3moe-Q4_K_M"])
def model(request: pytest.FixtureRequest) -> Path:
    return goldens_dir() / "models" / f"{request.param}.gguf"


@pytest.fixture(scope="module")
def want(model: Path) -> dict[str, Answer]:
    with serving(model) as engine:
        return alone(engine, cut_crowd())


def cut_crowd() -> list[GenerateRequest]:
    return [replace(one, message_starts=STARTS) for one in crowd(8)]


def test_a_crowd_gets_what_each_gets_alone_cold_and_warm(model: Path, want: dict[str, Answer]) -> None:
    with serving(model) as engine:
        assert answers(engine, cut_crowd()) == want
        assert answers(engine, cut_crowd()[::-1]) == want
        assert engine.counters()["cached_tokens_total"] > 0


@pytest.mark.parametrize(
    ("devices", "n_ubatch"),
    [(local(1), 1), (local(1, 2), 7), (local(3), 64), (mixed, 33)],
    ids=["token by token", "2 threads", "3 devices", "local and remote"],
)
def test_ubatches_threads_and_devices_do_not_matter(
    model: Path, want: dict[str, Answer], devices: Callable[[ExitStack], list[Device]], n_ubatch: int
) -> None:
    with serving(model, devices, n_ubatch=n_ubatch) as engine:
        assert answers(engine, cut_crowd()) == want


def test_preemption_does_not_matter(model: Path) -> None:
    rng = random.Random(11)
    sampling = SamplingParams(temperature=0.0, n_logprobs=0, ignore_eos=True)
    prompts = [[rng.randrange(33, 120) for _ in range(100)] for _ in range(3)]
    growing = [request(f"r{n}", prompt, 100, sampling=sampling) for n, prompt in enumerate(prompts)]
    with serving(model) as engine:
        expected = alone(engine, growing)
    with serving(model, ctx_size=384, n_ubatch=48) as engine:  # two fit when they begin, not when they end
        assert answers(engine, growing) == expected
        assert engine.counters()["preemptions_total"] > 0
