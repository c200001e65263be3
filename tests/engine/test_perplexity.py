"""A real model predicts a real text as well as the reference does; `make_perplexity.py` says how that was measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.text.tokenizer import Tokenizer
from tests.engine.make_perplexity import FIGURES, TEXT, WINDOW_TOKENS, negative_logs, perplexity, windows
from tests.fakes.stack import Stack
from tests.support import model_path


def native_device() -> Device:
    cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")
    device: Device = cpu.CpuDevice("CPU")
    return device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("open_device", "figure", "cache_type", "tolerance"),
    [
        (lambda: NumpyDevice(n_threads=2), "exact", GGMLType.F32, 1e-3),
        # Rounding activations to 8 bits moves the log-probability of a token by a tenth or two, so the mean of so few
        # tokens by some thousandths, at random, here and in the reference.
        (native_device, "as it is", GGMLType.F16, 1e-2),
    ],
    ids=["numpy", "cpu"],
)
def test_perplexity_is_the_reference_s(
    open_device: Callable[[], Device], figure: str, cache_type: GGMLType, tolerance: float
) -> None:
    path, figures = model_path(), json.loads(FIGURES.read_text())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == figures["model sha256"]
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == figures["text sha256"]
    gguf = GGUFFile.open(path)
    parts = []
    stack = Stack(gguf, [open_device()], cache_type=cache_type, n_cells=WINDOW_TOKENS, max_outputs=WINDOW_TOKENS)
    for window in windows(Tokenizer.from_metadata(gguf.metadata)):
        stack.restart()
        parts.append(negative_logs(stack.feed(window, every=True), window))
    stack.close()
    assert sum(map(len, parts)) == figures["scored tokens"]
    assert perplexity(parts) == pytest.approx(figures[figure], rel=tolerance)
