"""What a decoded token costs on the wire, at a long context."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.rpc.worker import WorkerSettings
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.stack import Stack
from tests.rpc.workers import remote

STEPS = 10
LIMIT_BYTES = 2048


@pytest.mark.parametrize("extensions", [True, False], ids=["tandem", "stock"])
def test_a_token_at_4k_context_costs_one_round_trip_and_two_kib_per_stage(tmp_path: Path, extensions: bool) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(GGMLType.Q4_1, n_layers=2))
    with ExitStack() as resources:
        settings = WorkerSettings(extensions=extensions)
        devices = [resources.enter_context(remote(NumpyDevice("CPU"), settings)) for _ in range(2)]
        stack = Stack(GGUFFile.open(model), devices, n_cells=4096, cache_type=GGMLType.F16)
        stack.feed([i % 200 for i in range(4000)], ubatch_size=512)
        stack.feed([1])
        before = [device.link.dispatcher.stats() for device in devices]
        for token in range(STEPS):
            stack.feed([token])
        after = [device.link.dispatcher.stats() for device in devices]
        activation_bytes = 4 * stack.model.n_embd
        for past, now, takes_push in zip(before, after, (False, extensions), strict=True):
            # That a push has come is told besides; nobody waits for it, and the activation is not among what is sent.
            assert now.answers - past.answers == (2 if takes_push else 1) * STEPS
            bulk_bytes = 0 if takes_push else activation_bytes
            assert (now.sent_bytes - past.sent_bytes) / STEPS - bulk_bytes <= LIMIT_BYTES
            assert now.commands.get("PUSH_TAKE", 0) - past.commands.get("PUSH_TAKE", 0) == takes_push * STEPS
            runs = ("GRAPH_RUN", "TAKE_TURN", "PUSH_TURN") if extensions else ("GRAPH_RECOMPUTE",)
            assert sum(now.commands.get(run, 0) - past.commands.get(run, 0) for run in runs) == STEPS
            assert now.commands.get("GRAPH_COMPUTE", 0) == past.commands.get("GRAPH_COMPUTE", 0)
        stack.close()
