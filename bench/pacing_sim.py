"""What pacing gains, on devices whose times are known: the real engine over stages that sleep by their rows.

`python -m bench.pacing_sim [--fixed-ms 8] [--row-ms 1] [--stages 1,2,4] [--trace out.json]`

A whole model takes `fixed + rows * row` for a ubatch; over S stages each takes its S-th part. Prints prompts, one
stream and sixteen, beside one stage and, for prompts, beside the bound of a pipeline with as many ubatches. What numpy
needs for the tiny model behind it comes on top, so times should be long.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from app.engine.device import Handle
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.trace import Trace
from bench.split import run
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import open_engine

PROMPT_TOKENS, DECODE_TOKENS, N_STREAMS = 2048, 40, 16


class Sleeper(NumpyDevice):
    """Takes a time of its own for every ubatch, besides what numpy needs for a tiny model."""

    def __init__(self, name: str, fixed_s: float, row_s: float) -> None:
        super().__init__(name, n_threads=1)
        self._fixed_s, self._row_s = fixed_s, row_s

    def run(self, handle: Handle) -> None:
        rows = re.search(r" t(\d+) ", handle.program_name)
        assert rows is not None
        seconds = self._fixed_s + int(rows[1]) * self._row_s
        self._lane.submit(lambda: time.sleep(seconds))
        super().run(handle)


def measure(path: Path, n_stages: int, fixed_s: float, row_s: float, trace: Trace | None) -> tuple[list[float], float]:
    """Best seconds of a prompt, of one stream, of sixteen; and the ubatches of the prompt."""
    with ExitStack() as stack:
        devices = [Sleeper(f"D{i}", fixed_s / n_stages, row_s / n_stages) for i in range(n_stages)]
        for device in devices:
            stack.callback(device.close)
        engine: Engine = open_engine(
            path, devices, ctx_size=8192, n_slots=N_STREAMS, n_ubatch=512, max_queue=32, max_in_flight=n_stages + 1,
            tensor_split=[1.0] * n_stages, trace=trace,
        )  # fmt: skip
        stack.callback(engine.close)
        if trace is not None:
            trace.stage_names = [f"stage {i}" for i in range(n_stages)]
        rng = np.random.default_rng(3)
        long = [[int(t) for t in rng.integers(33, 120, PROMPT_TOKENS)]]
        shorts = [[int(t) for t in rng.integers(33, 120, 4)] for _ in range(N_STREAMS)]
        best = [float("inf")] * 3
        n_ubatches = 0.0
        for round_ in range(3):
            before = engine.counters()["ubatches_total"]
            best[0] = min(best[0], run(engine, long, 1, f"p{round_}")[0])
            n_ubatches = engine.counters()["ubatches_total"] - before
            best[1] = min(best[1], run(engine, shorts[:1], DECODE_TOKENS, f"d{round_}")[0])
            best[2] = min(best[2], run(engine, shorts, DECODE_TOKENS, f"s{round_}")[0])
        return best, n_ubatches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fixed-ms", type=float, default=8.0)
    parser.add_argument("--row-ms", type=float, default=1.0)
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--trace", type=Path, default=None, help="trace of the last of --stages")
    given = parser.parse_args()
    all_stages = [int(part) for part in given.stages.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_llama(Path(folder) / "tiny.gguf", TinyLlama(n_layers=4, n_ctx=4096))
        one: list[float] = []
        for n_stages in all_stages:
            trace = Trace(given.trace) if given.trace is not None and n_stages == all_stages[-1] else None
            best, n = measure(path, n_stages, given.fixed_ms / 1e3, given.row_ms / 1e3, trace)
            if trace is not None:
                trace.save()
            one = one or best
            gains = [whole / seconds for whole, seconds in zip(one, best, strict=True)]
            print(
                f"{n_stages} stage(s): prompt {best[0]:.3f} s ({n:.0f} ubatches, {gains[0]:.2f}x, bound "
                f"{n_stages * n / (n + n_stages - 1):.2f}x), one stream {best[1]:.3f} s ({gains[1]:.2f}x), "
                f"{N_STREAMS} streams {best[2]:.3f} s ({gains[2]:.2f}x)",
                flush=True,
            )


if __name__ == "__main__":
    main()
