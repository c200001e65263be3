"""Every architecture against logits of an independent engine, with float32 activations and a float32 cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.gguf.reader import GGUFFile
from app.engine.models import registry
from tests.engine.models.runner import Runner
from tests.support import goldens_dir

LENGTHS = (1, 7, 33, 100, 300)
#: Limits for rms and maximum of engine minus golden; GELU goes through a 16-bit table in the golden's engine.
LIMITS = {"gemma3": (3e-3, 3e-2)}
DEFAULT_LIMITS = (2e-4, 2e-3)


def golden_names() -> list[str]:
    try:
        folder = goldens_dir() / "models"
    except pytest.skip.Exception:
        return []
    return sorted(path.stem for path in folder.glob("*.gguf"))


def is_served(path: Path) -> bool:
    return GGUFFile.open(path).text("general.architecture") in registry.ARCHITECTURES


@pytest.fixture(scope="module", params=golden_names() or ["none"])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Runner, dict[str, np.ndarray], tuple[float, float]]]:
    path = goldens_dir() / "models" / f"{request.param}.gguf"
    if not is_served(path):
        pytest.skip("architecture not served yet")
    runner = Runner(NumpyDevice(), GGUFFile.open(path))
    logits = np.load(goldens_dir() / "logits" / f"{request.param}.npz")
    yield runner, logits, LIMITS.get(runner.model.architecture, DEFAULT_LIMITS)
    runner.close()


def check(difference: np.ndarray, limits: tuple[float, float], what: str) -> None:
    rms, top = np.sqrt(np.mean(difference.astype(np.float64) ** 2)), np.abs(difference).max()
    assert rms <= limits[0] and top <= limits[1], f"{what}: rms {rms:.2e}, max {top:.2e}"


@pytest.mark.parametrize("n", LENGTHS)
def test_logits(case, n: int) -> None:
    runner, golden, limits = case
    runner.forget()
    got = runner.logits(golden[f"tokens_{n}"].tolist())
    check(got[-1] - golden[f"exact_last_{n}"], limits, "last position")
    chosen = np.take_along_axis(got, golden[f"exact_top_ids_{n}"].astype(np.int64), axis=1)
    check(chosen - golden[f"exact_top_val_{n}"], limits, "best tokens of every position")
    peak = got.max(axis=1, keepdims=True)
    lse = np.log(np.exp((got - peak).astype(np.float64)).sum(axis=1)) + peak[:, 0]
    check(lse - golden[f"exact_lse_{n}"], limits, "log of the sum of exponentials")


def test_residual_stream_after_every_layer(case) -> None:
    runner, golden, limits = case
    tokens = golden["tokens_33"].tolist()
    for layer, want in enumerate(golden["exact_hidden_33"]):
        runner.forget()
        got = runner.batch({0: tokens}, [32], until=layer + 1)[-1]
        scale = max(1.0, float(np.sqrt(np.mean(want.astype(np.float64) ** 2))))
        check((got - want) / scale, limits, f"layer {layer}")


@pytest.mark.parametrize("n", [7, 100])
def test_greedy_continuation(case, n: int) -> None:
    """Token by token; a first mismatch is an error only where the golden's lead was clear."""
    runner, golden, limits = case
    runner.forget()
    tokens = golden[f"prompt_{n}"].tolist()
    for step, want in enumerate(golden[f"exact_greedy_{n}"].tolist()):
        token = int(runner.logits(tokens, [len(tokens) - 1])[0].argmax())
        if token != want:
            assert golden[f"exact_lead_{n}"][step] <= 6 * limits[0], f"step {step}: {token} instead of {want}"
            return
        tokens = [token]
