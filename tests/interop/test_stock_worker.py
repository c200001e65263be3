"""Our control plane over llama.cpp's own workers: the same tokens as llama.cpp, whatever the split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.engine.device import Device, WeightHint
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.kernels.hash import fnv1a64
from app.engine.serving.types import StateAction, StateOp
from app.rpc.connect import connect
from tests.fakes.stack import Stack, values_of
from tests.interop.stock import stock_worker
from tests.rpc.programs import sum_program
from tests.rpc.workers import QUICK, connected, tcp_worker
from tests.support import goldens_dir, model_path

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("asked_for"), pytest.mark.timeout(600)]

#: rms of llama.cpp's 8-bit activations against float32, by the goldens' own table; a lead above six times that holds.
SMOLLM2_RMS, TINY_RMS = 0.36, 0.16


def follow(stack: Stack, prompt: list[int], golden: list[int], leads: list[float], rms: float) -> int:
    """Walk along llama.cpp's own greedy tokens; at how many steps we would have chosen the same.

    Where we would not, llama.cpp itself must have been undecided.
    """
    same = 0
    stack.restart()
    feed = prompt
    for step, theirs in enumerate(golden):
        ours = int(np.argmax(stack.feed(feed)[-1]))
        assert ours == theirs or leads[step] < 6 * rms, f"step {step}: {ours}, but {theirs} led by {leads[step]}"
        same += ours == theirs
        feed = [theirs]
    return same


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def devices(request: pytest.FixtureRequest) -> Iterator[list[Device]]:
    with ExitStack() as stack:
        endpoints = [stack.enter_context(stock_worker()) for _ in range(request.param)]
        yield [connect(endpoint, first_index=i)[0] for i, endpoint in enumerate(endpoints)]


@pytest.mark.parametrize("prompt", ["one_word", "english", "chat", "python"])
def test_smollm2_gives_the_reference_tokens(devices: list[Device], prompt: str) -> None:
    golden = np.load(goldens_dir() / "real" / "smollm2-135m.npz")
    stack = Stack(GGUFFile.open(model_path()), devices, cache_type=GGMLType.F16)
    reference, leads = golden[f"{prompt}_fa1_greedy"][:32].tolist(), golden[f"{prompt}_fa1_lead"].tolist()
    try:
        assert follow(stack, golden[f"{prompt}_tokens"].tolist(), reference, leads, SMOLLM2_RMS) >= 28
    finally:
        stack.close()


#: Tiny models of every family: that rms, and at how many of 32 steps we must at least choose the same. Of the hybrids
#: llama.cpp itself follows no other way of computing to the end.
FAMILIES = {
    "llama-Q8_0": (TINY_RMS, 30),
    "llama3-rope-Q8_0": (TINY_RMS, 30),
    "qwen2-Q8_0": (TINY_RMS, 30),
    "qwen3-Q8_0": (TINY_RMS, 30),
    "qwen3moe-Q4_K_M": (TINY_RMS, 30),
    "gemma3-Q4_K_M": (TINY_RMS, 30),
    "gpt-oss-MXFP4_MOE": (TINY_RMS, 30),
    "qwen35-Q4_K_M": (0.26, 24),
    "qwen35moe-Q4_K_M": (0.16, 28),
    "qwen35-mtp-Q5_K_M": (0.23, 24),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_models_of_every_family(devices: list[Device], name: str) -> None:
    golden = np.load(goldens_dir() / "logits" / f"{name}.npz")
    rms, at_least = FAMILIES[name]
    stack = Stack(GGUFFile.open(goldens_dir() / "models" / f"{name}.gguf"), devices, cache_type=GGMLType.F16)
    try:
        for n in (7, 100):
            reference, leads = golden[f"fa1_greedy_{n}"].tolist(), golden[f"fa1_lead_{n}"].tolist()
            assert follow(stack, golden[f"prompt_{n}"].tolist(), reference, leads, rms) >= at_least
    finally:
        stack.close()


def test_snapshots_are_made_and_restored_on_a_stock_worker(devices: list[Device]) -> None:
    """The state a sequence goes on with is the one that was kept, to the last bit."""
    stack = Stack(GGUFFile.open(goldens_dir() / "models" / "qwen35-mtp-Q5_K_M.gguf"), devices)
    tokens = np.load(goldens_dir() / "logits" / "qwen35-mtp-Q5_K_M.npz")["tokens_100"].tolist()

    def go_on(move: StateAction) -> list[np.ndarray]:
        stack.n_past = 64
        ubatch = replace(stack.ubatch(tokens[64:80], [15]), before=(StateOp(move, 0, 0),))
        return [values_of(stack.executor.submit(ubatch)), stack.feed(tokens[80:])]

    try:
        stack.feed(tokens[:64])
        kept, restored = go_on(StateAction.TAKE), go_on(StateAction.RESTORE)
        assert all(np.array_equal(a, b) for a, b in zip(kept, restored, strict=True))
    finally:
        stack.close()


def test_the_devices_of_one_stock_worker_share_its_one_connection() -> None:
    with stock_worker(n_devices=2) as endpoint:
        devices = connect(endpoint, timeouts=QUICK)
        one = np.arange(4, dtype=np.float32)
        for number, device in enumerate(devices):
            buffer = device.alloc(1024)
            handle = device.prepare(sum_program(buffer))
            for i in range(3):
                device.write(buffer, 0, one * i)
                device.write(buffer, 128, one * 10 * number)
                device.run(handle)
                got = np.frombuffer(device.read(buffer, 256, 16).result(20), np.float32)
                assert (got == one * i + one * 10 * number).all()
        for device in devices:
            device.close()


def test_bytes_of_all_sizes_and_ways() -> None:
    rng = np.random.default_rng(5)
    with stock_worker() as endpoint:
        (device,) = connect(endpoint, timeouts=QUICK)
        buffer = device.alloc(12 << 20)
        data = rng.integers(0, 256, 12 << 20, np.uint8)
        device.write(buffer, 0, data)
        for offset, size in ((0, 1), (5, 4096), (4099, 70_000), (0, data.size)):
            assert bytes(device.read(buffer, offset, size).result(20)) == data[offset : offset + size].tobytes()
        device.copy(buffer, 0, buffer, 6 << 20, 5 << 20)
        device.fill(buffer, 10, 20, 0xAB)
        assert bytes(device.read(buffer, 6 << 20, 5 << 20).result(20)) == data[: 5 << 20].tobytes()
        expected = data[:10].tobytes() + b"\xab" * 20 + data[30:40].tobytes()
        assert bytes(device.read(buffer, 0, 40).result(20)) == expected
        device.close()


def test_a_stock_cache_takes_our_weights_and_gives_them_back(tmp_path: Path) -> None:
    data = np.random.default_rng(6).integers(0, 256, 11 << 20, np.uint8)
    hint = WeightHint("w", GGMLType.I8, (data.size, 1, 1, 1), lambda: fnv1a64(data.data))
    (tmp_path / "rpc").mkdir()
    for round_ in range(2):
        with stock_worker(cache_dir=tmp_path) as endpoint:
            (device,) = connect(endpoint, timeouts=QUICK)
            buffer = device.alloc(data.size)
            device.write(buffer, 0, data, hint=hint)
            assert bytes(device.read(buffer, 0, data.size).result(60)) == data.tobytes()
            sent = device.link.dispatcher.stats().sent_bytes
            assert (sent > data.size) == (round_ == 0)
            device.close()


def test_our_worker_and_theirs_see_the_same_commands() -> None:
    """One decode step over a worker that passes for a stock one, and over a stock one."""
    from app.engine.devices.numpy import NumpyDevice
    from app.rpc.worker import WorkerSettings

    model = goldens_dir() / "models" / "llama-small-F32.gguf"
    counts = []
    with stock_worker() as endpoint:
        counts.append(_decode_commands(model, connect(endpoint)))
    with tcp_worker(NumpyDevice(), settings=WorkerSettings(extensions=False)) as worker, connected(worker) as devices:
        counts.append(_decode_commands(model, devices))
    assert counts[0] == counts[1]
    assert counts[0]["GRAPH_RECOMPUTE"] == counts[0]["GET_TENSOR"] == 10
    assert set(counts[0]) == {"SET_TENSOR", "GRAPH_RECOMPUTE", "GET_TENSOR"}


def _decode_commands(model: Path, devices: list[Device]) -> dict[str, int]:
    stack = Stack(GGUFFile.open(model), devices, cache_type=GGMLType.F16)
    stack.greedy([1, 2, 3], 3)
    dispatcher = devices[0].link.dispatcher  # type: ignore[attr-defined]
    before = dispatcher.stats().commands
    for token in range(10):
        stack.feed([token])
    after = dispatcher.stats().commands
    stack.close()
    return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
