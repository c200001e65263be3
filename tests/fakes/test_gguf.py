"""The tiny models are files like any other, in every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.engine.ggml import GGMLType, row_bytes
from app.engine.gguf.quants import DECODERS, dequantize
from app.engine.gguf.reader import GGUFFile
from app.engine.models import registry
from tests.fakes.gguf import TinyLlama, random_rows, write_tiny_llama


@pytest.mark.parametrize("type_", sorted(DECODERS), ids=lambda t: t.name)
def test_random_rows_have_the_spread_that_was_asked_for(type_: GGMLType) -> None:
    rows = random_rows(type_, 16, 512, np.random.default_rng(1), std=0.1)
    assert rows.shape == (16, row_bytes(type_, 512))
    values = dequantize(type_, rows)
    assert np.isfinite(values).all() and 0.05 < values.std() < 0.2


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q4_1, GGMLType.Q4_K, GGMLType.IQ1_M, GGMLType.NVFP4])
def test_a_tiny_model_loads(type_: GGMLType, tmp_path: Path) -> None:
    spec = TinyLlama.of_type(type_, n_layers=3, tied=True)
    model = registry.load(GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf", spec)))
    assert (model.n_layers, model.n_vocab) == (3, spec.n_vocab)
    assert [w.layer for w in model.weights() if w.name == "token_embd.weight"] == [-1, 3]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in "abc")
    write_tiny_llama(first)
    write_tiny_llama(second)
    write_tiny_llama(other, TinyLlama(seed=2))
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
