"""A model on devices without the serving layer: feed tokens, get logits. For tests of plans, devices and models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.device import Device
from app.engine.embedding import TokenEmbedding
from app.engine.executor import Executor, Running, Scratch
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import load_stages, plan_stages
from app.engine.models import registry
from app.engine.serving.types import BLOCK_CELLS, Output, OutputKind, StateAction, StateOp, Ubatch, UbatchSequence
from app.engine.stage import StageLimits


class Stack:
    """One sequence over a model's stages. `feed` extends it; `restart` begins another one in the same cells."""

    def __init__(
        self,
        gguf: GGUFFile,
        devices: Sequence[Device],
        *,
        n_cells: int = 512,
        max_tokens: int = 512,
        max_outputs: int = 512,
        cache_type: GGMLType = GGMLType.F32,
        tensor_split: Sequence[float] | None = None,
        blocks: Sequence[int] | None = None,
    ) -> None:
        self.gguf = gguf
        self.devices = list(devices)
        self.model = registry.load(gguf)
        self.limits = StageLimits(
            max_tokens=max_tokens,
            max_outputs=max_outputs,
            max_seqs=4,
            n_cells=n_cells + 256,
            n_snapshots=1,
            key_type=cache_type,
            value_type=cache_type,
        )
        planned = plan_stages(self.model, self.devices, self.limits, tensor_split)
        self.stages = load_stages(gguf, self.model, planned, self.limits)
        self.scratch = Scratch(cell=n_cells, state_row=4, first_snapshot_row=5)
        embedding = TokenEmbedding.of(gguf, self.model)
        self.executor = Executor(self.model, self.stages, embedding, self.limits, self.scratch)
        self.blocks = np.array(blocks if blocks is not None else range(n_cells // BLOCK_CELLS), dtype=np.int32)
        self._n_ubatches = 0
        self.n_past = 0

    def restart(self, blocks: Sequence[int] | None = None) -> None:
        self.n_past = 0
        if blocks is not None:
            self.blocks = np.array(blocks, dtype=np.int32)

    def ubatch(self, tokens: Sequence[int], outputs: Sequence[int]) -> Ubatch:
        """The next rows of the sequence; `outputs` are the rows that need logits."""
        n = len(tokens)
        positions = np.arange(self.n_past, self.n_past + n, dtype=np.int32)
        blocks = self.blocks[: -(-(self.n_past + n) // BLOCK_CELLS)]
        before = (StateOp(StateAction.CLEAR, 0),) if self.n_past == 0 else ()
        self._n_ubatches += 1
        ubatch = Ubatch(
            id=self._n_ubatches,
            epoch=0,
            tokens=np.asarray(tokens, dtype=np.int32),
            positions=positions,
            cells=blocks[positions // BLOCK_CELLS].astype(np.int64) * BLOCK_CELLS + positions % BLOCK_CELLS,
            slots=np.zeros(n, dtype=np.int32),
            sequences=(UbatchSequence("s", 0, 0, n, self.n_past, blocks, False),),
            outputs=tuple(Output(row, "s", OutputKind.SAMPLE, self.n_past + row + 1) for row in outputs),
            before=before,
        )
        self.n_past += n
        return ubatch

    def feed(
        self, tokens: Sequence[int], *, every: bool = False, ubatch_size: int | None = None, hidden: bool = False
    ) -> NDArray[np.float32]:
        """Logits of the last token [1, n_vocab], or with `every` of all of them [n, n_vocab]."""
        size = ubatch_size or self.limits.max_tokens
        running = []
        for at in range(0, len(tokens), size):
            part = tokens[at : at + size]
            is_last = at + size >= len(tokens)
            outputs = range(len(part)) if every else [len(part) - 1] if is_last else []
            running.append(self.executor.submit(self.ubatch(part, outputs), hidden=hidden))
        return np.concatenate([values_of(one) for one in running])

    def greedy(self, prompt: Sequence[int], n_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens after a prompt, and at each step the lead of the best over the second best."""
        tokens, leads = [], []
        logits = self.feed(prompt)[-1]
        for _ in range(n_tokens):
            best = int(np.argmax(logits))
            second = np.partition(logits, -2)[-2]
            tokens.append(best)
            leads.append(float(logits[best] - second))
            logits = self.feed([best])[-1]
        return tokens, leads

    def close(self) -> None:
        for stage in self.stages:
            stage.free()
        for device in self.devices:
            device.close()


def values_of(running: Running) -> NDArray[np.float32]:
    """All output rows of a ubatch whose rows were not selected: [n_outputs, n]; waits for them."""
    values = [row.values for row in running.rows()]
    return np.array(values, np.float32).reshape(len(values), running.width)
