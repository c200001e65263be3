"""llama.cpp's own client over our workers: it gets what it gets on its own CPU, and uses the wire as we do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import fleet
from app.engine.devices.numpy import NumpyDevice
from app.rpc.weights import MIN_BYTES
from app.rpc.wire import Command
from app.rpc.worker import Worker, WorkerSettings
from tests.interop.stock import run_stock_client
from tests.interop.tap import tapped
from tests.rpc.workers import tcp_worker
from tests.support import goldens_dir, model_path

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("asked_for"), pytest.mark.timeout(900)]

#: Distance of llama.cpp's 8-bit activations from float32, rms, by the goldens' own table; see there.
RMS = {"SmolLM2": 0.36, "llama-small-F32": 0.0045, "llama-Q8_0": 0.14, "qwen2-Q8_0": 0.1, "qwen3-Q8_0": 0.14}
RMS |= {"gemma3-Q4_K_M": 0.21, "qwen3moe-Q4_K_M": 0.15, "gpt-oss-MXFP4_MOE": 0.12, "qwen35-Q4_K_M": 0.39}
STEPS = 24
#: Models that llama.cpp itself soon answers otherwise when it computes in another way: steps that must agree.
UNDECIDED = {"SmolLM2": 4, "qwen35-Q4_K_M": 4}
#: Behind its short prompt llama.cpp leads by half of what its own rounding moves logits: that decides nothing.
PROMPTS = {"qwen35-Q4_K_M": "prompt_100"}
ONE_THREAD = fleet.LocalOptions(threads=1)


def endpoints(workers: Sequence[Worker]) -> list[str]:
    return [f"127.0.0.1:{worker.port}" for worker in workers]


def check_same(near: dict[str, Any], far: dict[str, Any], rms: float, at_least: int) -> None:
    """Up to the first different token the logits agree, and there llama.cpp itself was undecided."""
    for step in range(STEPS):
        theirs = dict(near["best"][step])
        common = [(value, theirs[token]) for token, value in far["best"][step] if token in theirs]
        distance = float(np.sqrt(np.mean([(a - b) ** 2 for a, b in common])))
        assert len(common) >= 4 and distance < 6 * rms, f"step {step}: logits differ by {distance}"
        if near["tokens"][step] != far["tokens"][step]:
            assert near["leads"][step] < 6 * rms
            assert step >= at_least
            return


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        *("SmolLM2", "llama-small-F32", "llama-Q8_0", "qwen2-Q8_0", "qwen3-Q8_0", "gemma3-Q4_K_M", "qwen3moe-Q4_K_M"),
        *("gpt-oss-MXFP4_MOE", "qwen35-Q4_K_M"),
    ],
)
@pytest.mark.parametrize("device", ["NUMPY", "CPU"])
def test_the_same_tokens_as_on_its_own_cpu(name: str, device: str, n_workers: int) -> None:
    if name == "SmolLM2":
        model = model_path()
        prompt = np.load(goldens_dir() / "real" / "smollm2-135m.npz")["english_tokens"].tolist()
    else:
        model = goldens_dir() / "models" / f"{name}.gguf"
        prompt = np.load(goldens_dir() / "logits" / f"{name}.npz")[PROMPTS.get(name, "prompt_7")].tolist()
    near = run_stock_client(model, prompt, STEPS)
    with ExitStack() as stack:
        workers = [stack.enter_context(tcp_worker(*fleet.open_local((device,), ONE_THREAD))) for _ in range(n_workers)]
        far = run_stock_client(model, prompt, STEPS, endpoints(workers))
    check_same(near, far, RMS[name], UNDECIDED.get(name, 16))


@pytest.mark.parametrize("flash_attn", [True, False])
def test_prompts_in_pieces_and_both_kinds_of_attention(flash_attn: bool) -> None:
    model = goldens_dir() / "models" / "llama-small-F32.gguf"
    prompt = np.load(goldens_dir() / "logits" / "llama-small-F32.npz")["prompt_100"].tolist()
    near = run_stock_client(model, prompt, STEPS, flash_attn=flash_attn)
    with tcp_worker(NumpyDevice()) as worker:
        far = run_stock_client(model, prompt, STEPS, endpoints([worker]), flash_attn=flash_attn, n_ubatch=32)
    check_same(near, far, RMS["llama-small-F32"], STEPS)


def test_a_step_on_the_wire_looks_as_ours_does() -> None:
    """Inputs, the graph again, one read; GRAPH_COMPUTE only when the shape changes."""
    model = goldens_dir() / "models" / "llama-small-F32.gguf"
    with tcp_worker(NumpyDevice()) as worker, tapped(worker.port) as tap:
        run_stock_client(model, [1, 2, 3], STEPS, [f"127.0.0.1:{tap.port}"])
        commands = [command for command, _ in tap.commands]
        last_graph = len(commands) - 1 - commands[::-1].index(Command.GRAPH_COMPUTE)
        steps = commands[last_graph + 1 :]
        assert set(steps) - {Command.FREE_BUFFER} == {Command.SET_TENSOR, Command.GRAPH_RECOMPUTE, Command.GET_TENSOR}
        assert commands.count(Command.GRAPH_RECOMPUTE) >= STEPS - 4


def test_large_weights_stay_home(tmp_path: Path) -> None:
    """A stock client hashes tensors above 10 MiB: SmolLM2's embedding does not travel to a worker that has the file."""
    model = model_path()
    settings = WorkerSettings(model_dir=model.parent, hash_dir=tmp_path)
    assert MIN_BYTES < 10 << 20
    sent = []
    for chosen in (WorkerSettings(), settings):
        with tcp_worker(NumpyDevice(), settings=chosen) as worker, tapped(worker.port) as tap:
            worker.wait_for_weights()
            run_stock_client(model, [1, 2, 3], 1, [f"127.0.0.1:{tap.port}"])
            sent.append(sum(size for command, size in tap.commands if command == Command.SET_TENSOR))
    assert sent[1] < sent[0] - (15 << 20)
