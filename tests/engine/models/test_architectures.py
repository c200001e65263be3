"""Architectures and variants without a golden model file: tiny random ones, and logits of llama.cpp for them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.gguf.reader import GGUFFile
from app.engine.models import registry
from tests.engine.models.make_goldens import COLUMNS, DATA, N_CTX, ROWS, digest, tokens
from tests.engine.models.runner import Runner
from tests.fakes.architectures import RECIPES, write_model

GELU_THROUGH_A_TABLE = {"gemma3-softcap"}


@pytest.mark.parametrize("name", RECIPES)
def test_logits(name: str, tmp_path: Path) -> None:
    golden = np.load(DATA)
    path = write_model(tmp_path / "model.gguf", name)
    assert np.array_equal(digest(path), golden[f"{name} sha256"]), "other weights than the golden's; make it anew"
    with closing(Runner(NumpyDevice(), GGUFFile.open(path), n_ctx=N_CTX)) as runner:
        got = runner.logits(tokens(), ROWS)[:, COLUMNS]
    limit = 3e-3 if name in GELU_THROUGH_A_TABLE else 2e-4
    difference = got - golden[name]
    assert np.sqrt(np.mean(difference**2)) <= limit and np.abs(difference).max() <= 10 * limit


def test_every_architecture_is_proven_somewhere() -> None:
    by_goldens = {"llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma3", "gpt-oss"}
    assert set(registry.ARCHITECTURES) == by_goldens | {recipe.architecture for recipe in RECIPES.values()}
