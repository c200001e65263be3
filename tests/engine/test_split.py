"""The split is invisible: the same bytes on one device, on several, and over workers, at equal ubatch shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.splits import SPLITS
from tests.fakes.stack import Stack

#: A prompt at whose end the two best logits are closer than 1e-4: any rounding that differs shows in the token.
KNIFE_EDGE_SEED, KNIFE_EDGE_LENGTH, KNIFE_EDGE_LEAD = 8720, 9, 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split") / "tiny.gguf"
    return write_tiny_llama(path, TinyLlama(GGMLType.Q4_1, n_layers=4))


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Stack]:
    stack = Stack(GGUFFile.open(model), [NumpyDevice("CPU")], cache_type=GGMLType.F32)
    yield stack
    stack.close()


@pytest.fixture(params=list(SPLITS))
def split(request: pytest.FixtureRequest, model: Path) -> Iterator[Stack]:
    with ExitStack() as resources:
        devices = SPLITS[request.param](resources)
        stack = Stack(GGUFFile.open(model), devices, cache_type=GGMLType.F32)
        assert len(stack.stages) == len(devices)
        yield stack
        stack.close()


def knife_edge_prompt() -> list[int]:
    drawn: list[int] = np.random.default_rng(KNIFE_EDGE_SEED).integers(0, 256, 24).tolist()
    return drawn[:KNIFE_EDGE_LENGTH]


def test_logits_are_the_same_bits_however_the_layers_stand(whole: Stack, split: Stack) -> None:
    prompt = np.random.default_rng(3).integers(0, 256, 90).tolist()
    for stack in (whole, split):
        stack.restart()
    for ubatch_size in (90, 32):
        whole.restart()
        split.restart()
        want = whole.feed(prompt, every=True, ubatch_size=ubatch_size)
        assert np.array_equal(split.feed(prompt, every=True, ubatch_size=ubatch_size), want)
    assert split.greedy([7], 12) == whole.greedy([7], 12)


def test_a_knife_edge_prompt_gets_the_same_token(whole: Stack, split: Stack) -> None:
    answers = []
    for stack in (whole, split):
        stack.restart()
        tokens, leads = stack.greedy(knife_edge_prompt(), 8)
        assert leads[0] < KNIFE_EDGE_LEAD
        answers.append((tokens, leads))
    assert answers[0] == answers[1]


def test_one_copy_of_the_model_in_the_cluster(split: Stack) -> None:
    weights = sum(stage.weight_bytes() for stage in split.stages)
    needed = sum(s.weight_bytes() + s.cache_bytes() + s.compute_bytes() for s in split.stages)
    allocated = sum(buffer.size_bytes for stage in split.stages for buffer in stage.buffers)
    in_file = sum(info.n_bytes for name, info in split.gguf.tensors.items() if name != "token_embd.weight")
    assert weights == in_file
    assert needed <= allocated <= 1.05 * needed


def test_hidden_rows_come_instead_of_logits(whole: Stack, split: Stack) -> None:
    for stack in (whole, split):
        stack.restart()
    want = whole.feed([1, 2, 3], every=True, hidden=True)
    assert want.shape == (3, whole.model.n_embd)
    assert np.array_equal(split.feed([1, 2, 3], every=True, hidden=True), want)


def test_where_blocks_lie_does_not_matter(whole: Stack) -> None:
    prompt = np.random.default_rng(5).integers(0, 256, 150).tolist()
    whole.restart(blocks=range(8))
    want = whole.greedy(prompt, 6)
    whole.restart(blocks=[1, 4, 7])
    assert whole.greedy(prompt, 6) == want
    whole.restart(blocks=range(8))
