"""Speed of the reference device on a whole model: `python -m bench.numpy_device MODEL.gguf [THREADS] [PROMPT_TOKENS]`.

Prompt and decode of one sequence, through the stages and programs that the engine uses, without its serving layer.
With `--profile` the CPU time of every op, summed over the run and its threads.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

import numpy as np

from app.engine.devices.numpy import NumpyDevice, NumpyHandle
from app.engine.embedding import TokenEmbedding
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import load_stages, plan_stages
from app.engine.mask import CellRun, MaskRecipe, MaskRows
from app.engine.models import registry
from app.engine.models.base import BatchShape, InputKind, Model
from app.engine.stage import Stage, StageLimits

_DECODED_TOKENS = 24
_F32_BYTES = 4


class Bench:
    """One sequence whose token p lies in cell p."""

    def __init__(self, model: Model, embedding: TokenEmbedding, stage: Stage) -> None:
        self._model, self._embedding, self._stage = model, embedding, stage
        self._n_past = 0

    def step(self, n_tokens: int) -> float:
        """Seconds for one ubatch of that many tokens, with logits of the last."""
        start_s = time.perf_counter()
        n_kv = -(-(self._n_past + n_tokens) // 256) * 256
        positions = np.arange(self._n_past, self._n_past + n_tokens, dtype=np.int32)
        rows = (MaskRows(0, n_tokens, (CellRun(0, self._n_past + n_tokens),)),)
        x = self._embedding.rows(positions % self._model.n_vocab)
        small: dict[InputKind, Any] = {
            InputKind.POSITIONS: np.tile(positions, self._model.position_streams),
            InputKind.KV_ROWS: positions.astype(np.int64),
            InputKind.OUT_IDS: np.array([n_tokens - 1], np.int32),
        }
        masks = {InputKind.MASK: MaskRecipe(n_tokens, n_kv, None, rows)}
        logits = self._stage.submit(
            BatchShape(n_tokens, n_kv, 1), x, x.nbytes, small, masks, self._model.n_vocab * _F32_BYTES
        )
        logits.left.result()
        self._n_past += n_tokens
        return time.perf_counter() - start_s


def profile_ops(times_s: dict[str, float]) -> None:
    """From now on, steps of the reference device add their CPU time by op."""

    def timed(self: NumpyHandle, tensor: Any, step: Any) -> None:
        start_s = time.process_time()
        step()
        times_s[tensor.op.name] += time.process_time() - start_s

    NumpyHandle._run_step = timed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("threads", type=int, nargs="?", default=2)
    parser.add_argument("prompt_tokens", type=int, nargs="?", default=256)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()

    gguf = GGUFFile.open(arguments.model)
    model = registry.load(gguf)
    n_cells = arguments.prompt_tokens * 2 + 256
    limits = StageLimits(
        max_tokens=arguments.prompt_tokens,
        max_outputs=1,
        max_seqs=1,
        n_cells=-(-n_cells // 256) * 256,
        n_snapshots=0,
        key_type=GGMLType.F16,
        value_type=GGMLType.F16,
    )
    device = NumpyDevice("CPU", arguments.threads)
    (stage,) = load_stages(gguf, model, plan_stages(model, [device], limits), limits)
    bench = Bench(model, TokenEmbedding.of(gguf, model), stage)
    times_s: dict[str, float] = defaultdict(float)

    bench.step(arguments.prompt_tokens)  # prepares the program
    if arguments.profile:
        profile_ops(times_s)
    prompt_s = bench.step(arguments.prompt_tokens)
    print(f"prompt {arguments.prompt_tokens} tokens: {arguments.prompt_tokens / prompt_s:7.1f} tokens/s")
    report(times_s)
    bench.step(1)
    times_s.clear()
    decode_s = sorted(bench.step(1) for _ in range(_DECODED_TOKENS))
    print(f"decode: {1 / decode_s[_DECODED_TOKENS // 2]:7.1f} tokens/s (median of {_DECODED_TOKENS})")
    report(times_s)
    device.close()


def report(times_s: dict[str, float]) -> None:
    total_s = sum(times_s.values())
    for name, seconds in sorted(times_s.items(), key=lambda item: -item[1]):
        print(f"  {name:16} {1000 * seconds:9.1f} ms {100 * seconds / total_s:5.1f} %")


if __name__ == "__main__":
    main()
