"""The promise: a request gets the same bytes alone and in a crowd, whatever the ubatches, caches, threads and devices.

Outputs are compared by token, and logits bit for bit through the log-probabilities of every token. Run on the native
CPU device, whose kernels give each output element one order of accumulation; the numpy device promises less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.device import Device
from app.engine.ggml import GGMLType
from tests.fakes.crowd import Answer, alone, answers, crowd, local, mixed, serving
from tests.fakes.gguf import TinyLlama, write_tiny_llama


@pytest.fixture(scope="module", params=[GGMLType.Q4_1, GGMLType.Q4_K, GGMLType.F16], ids=lambda t: t.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("same") / f"{request.param.name}.gguf"
    return write_tiny_llama(path, TinyLlama.of_type(request.param, n_layers=3, n_heads=2, n_kv_heads=1))


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
