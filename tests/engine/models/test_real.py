"""Real models against logits of an independent engine, with float32 activations and a float32 cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.gguf.reader import GGUFFile
from tests.engine.models.runner import Runner
from tests.support import goldens_dir, model_path

#: Name of the goldens, name of the model to pull.
MODELS = [("smollm2-135m", "smollm2"), ("gemma3-270m", "gemma3-270m")]
#: The longest prompt is longer than Gemma's window.
PROMPTS = ["one_word", "story", "chinese", "chat", "repetitive"]


@dataclass
class Case:
    runner: Runner
    logits: dict[str, np.ndarray]
    prompts: dict[str, Any]
    is_gemma: bool

    def rms_limit(self, prompt: str) -> float:
        """1e-3, or for Gemma three times what the golden's engine differs from itself."""
        if not self.is_gemma:
            return 1e-3
        difference = self.prompts[prompt]["difference"]
        itself = difference.get("exact: batch 1 vs 512", difference["exact vs f32 weights, f16 kv"])
        return 3 * float(itself["rms"])


@pytest.fixture(scope="module", params=MODELS, ids=lambda names: names[0])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    golden, model = request.param
    folder = goldens_dir() / "real"
    gguf = GGUFFile.open(model_path(model))
    runner = Runner(NumpyDevice(n_threads=2), gguf)
    prompts = json.loads((folder / f"{golden}.json").read_text())["prompts"]
    yield Case(runner, np.load(folder / f"{golden}.npz"), prompts, golden.startswith("gemma"))
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(case: Case, prompt: str) -> None:
    golden, limit = case.logits, case.rms_limit(prompt)
    tokens = golden[f"{prompt}_tokens"].tolist()
    rows = sorted({*range(0, len(tokens), 1 + len(tokens) // 48), len(tokens) - 1})
    case.runner.forget()
    got = case.runner.logits(tokens, rows)
    chosen = np.take_along_axis(got, golden[f"{prompt}_exact_top_ids"][rows].astype(np.int64), axis=1)
    difference = chosen - golden[f"{prompt}_exact_top_val"][rows]
    last = got[-1, golden[f"{prompt}_exact_last_ids"]] - golden[f"{prompt}_exact_last_val"]
    for d in (difference, last):
        assert np.sqrt(np.mean(d.astype(np.float64) ** 2)) <= limit
    best = golden[f"{prompt}_exact_top_ids"][rows, 0]
    assert np.mean(got.argmax(axis=1) == best) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["story", "chat"])
def test_greedy(case: Case, prompt: str) -> None:
    golden = case.logits
    tokens = golden[f"{prompt}_tokens"].tolist()
    want = golden[f"{prompt}_exact_greedy"].tolist()
    case.runner.forget()
    got = case.runner.logits([*tokens, *want[:-1]], range(len(tokens) - 1, len(tokens) + 63)).argmax(axis=1)
    for step, (token, expected) in enumerate(zip(got.tolist(), want, strict=True)):
        if token != expected:
            assert golden[f"{prompt}_exact_lead"][step] <= 6 * case.rms_limit(prompt), f"step {step}"
            return
