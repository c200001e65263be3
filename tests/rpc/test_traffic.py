"""What decoded tokens and prompts cost on the wire, at a long context."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from app.engine.buckets import kv_bucket
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


@pytest.mark.parametrize("extensions", [True, False], ids=["tandem", "stock"])
def test_masks_of_prompts_do_not_travel(tmp_path: Path, extensions: bool) -> None:
    """Besides embeddings only row numbers go to a worker, a few bytes for each row. Stock workers get the masks."""
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(GGMLType.Q4_1, n_layers=2))
    prompt = [i % 200 for i in range(4096)]
    with ExitStack() as resources:
        settings = WorkerSettings(extensions=extensions)
        devices = [resources.enter_context(remote(NumpyDevice("CPU"), settings)) for _ in range(2)]
        stack = Stack(GGUFFile.open(model), devices, n_cells=4096, cache_type=GGMLType.F16)
        want = stack.feed(prompt, ubatch_size=512)
        before = [device.link.dispatcher.stats() for device in devices]
        stack.restart()
        assert np.array_equal(stack.feed(prompt, ubatch_size=512), want)
        after = [device.link.dispatcher.stats() for device in devices]
        n_ubatches, mask_bytes = 8, 2 * 512 * sum(kv_bucket(512 * i) for i in range(1, 9))
        for past, now, is_pushed_to in zip(before, after, (False, extensions), strict=True):
            activation_bytes = 0 if is_pushed_to else 4 * stack.model.n_embd * len(prompt)
            sent_bytes = now.sent_bytes - past.sent_bytes - activation_bytes
            n_masks = now.commands.get("WRITE_MASK", 0) - past.commands.get("WRITE_MASK", 0)
            if extensions:
                assert n_masks == n_ubatches and sent_bytes < 16 * len(prompt)
            else:
                assert n_masks == 0 and sent_bytes > mask_bytes
        stack.close()
