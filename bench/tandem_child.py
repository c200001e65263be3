"""Tandem's CPU device under measurement: answers commands on stdin with seconds; see `bench.measured`."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from app.engine.devices.cpu import CpuDevice
from app.engine.embedding import TokenEmbedding
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import load_stages, plan_stages
from app.engine.mask import CellRun, MaskRecipe, MaskRows
from app.engine.models import registry
from app.engine.models.base import BatchShape, InputKind
from app.engine.stage import StageLimits

_UBATCH_TOKENS = 512
_KV_STEP_CELLS = 256
_F32_BYTES = 4


class Context:
    """One sequence whose token p lies in cell p, through the stages and programs that the engine uses."""

    def __init__(self, path: str, n_threads: int, n_ctx: int, variant: str | None) -> None:
        gguf = GGUFFile.open(path)
        self._model = registry.load(gguf)
        limits = StageLimits(
            max_tokens=_UBATCH_TOKENS,
            max_outputs=1,
            max_seqs=1,
            n_cells=n_ctx,
            n_snapshots=0,
            key_type=GGMLType.F16,
            value_type=GGMLType.F16,
        )
        self.device = CpuDevice("CPU", n_threads, variant=variant)
        (self._stage,) = load_stages(gguf, self._model, plan_stages(self._model, [self.device], limits), limits)
        self._embedding = TokenEmbedding.of(gguf, self._model)
        self.n_past = 0

    def forget(self) -> None:
        self.n_past = 0

    def fill(self, n_tokens: int) -> None:
        """A prompt whose tokens see their own ubatch alone: cells hold real keys and values, soon."""
        for begin in range(0, n_tokens, _UBATCH_TOKENS):
            self._ubatch(min(_UBATCH_TOKENS, n_tokens - begin), _UBATCH_TOKENS)

    def step(self, n_tokens: int) -> None:
        """One ubatch with the logits of its last token; longer prompts in pieces."""
        while n_tokens > _UBATCH_TOKENS:
            self._ubatch(_UBATCH_TOKENS)
            n_tokens -= _UBATCH_TOKENS
        self._ubatch(n_tokens)

    def _ubatch(self, n_tokens: int, width: int | None = None) -> None:
        end = self.n_past + n_tokens
        n_kv = -(-end // _KV_STEP_CELLS) * _KV_STEP_CELLS
        positions = np.arange(self.n_past, end, dtype=np.int32)
        window = self._model.windows[0] if self._model.windows else None
        rows = (MaskRows(0, n_tokens, (CellRun(0, end),)),)
        masks = {
            kind: MaskRecipe(n_tokens, n_kv, sees, rows)
            for kind, sees in ((InputKind.MASK, width), (InputKind.MASK_SWA, window))
        }
        x = self._embedding.rows((positions.astype(np.int64) * 7919 % self._model.n_vocab).astype(np.int32))
        small: dict[InputKind, Any] = {
            InputKind.POSITIONS: np.tile(positions, self._model.position_streams),
            InputKind.KV_ROWS: positions.astype(np.int64),
            InputKind.OUT_IDS: np.array([n_tokens - 1], np.int32),
        }
        logits = self._stage.submit(
            BatchShape(n_tokens, n_kv, 1), x, x.nbytes, small, masks, self._model.n_vocab * _F32_BYTES
        )
        logits.left.result()
        self.n_past = end


def main() -> None:
    path, n_threads, n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    context = Context(path, n_threads, n_ctx, sys.argv[4] if len(sys.argv) > 4 else None)
    print("ready", context.device.caps.description, flush=True)
    for line in sys.stdin:
        command, n = line.split()
        if command == "forget":
            context.forget()
            print("0 0", flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        if command == "prompt":
            context.step(int(n))
        elif command == "fill":
            context.fill(int(n))
        else:
            for _ in range(int(n)):
                context.step(1)
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
    context.device.close()


if __name__ == "__main__":
    main()
