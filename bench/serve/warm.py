"""A prompt of 2,048 shared tokens and 32 of its own: cold, and again with other 32; greedy, one token of answer.

Time to first token is that of the whole request below HTTP. llama.cpp computes the same number of tokens in between.
The split is over two worker processes of one pinned thread each, on loopback.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from app.engine.devices.cpu import CpuDevice
from app.engine.engine import Engine
from app.rpc.connect import connect
from bench.rpc import process
from bench.serve.asking import ask, pinned_worker
from bench.serve.llama import llama
from bench.serve.report import Figure
from tests.fakes.serving import open_engine

SHARED_TOKENS, OWN_TOKENS = 2048, 32
MOST_EXTRA_TOKENS = 63


@contextmanager
def one_device(model: Path) -> Iterator[Engine]:
    device = CpuDevice("CPU", 2)
    engine = open_engine(model, [device], ctx_size=16384, n_slots=4, n_ubatch=512)
    yield engine
    engine.close()
    engine.check_integrity()
    device.close()


@contextmanager
def two_workers(model: Path) -> Iterator[Engine]:
    with ExitStack() as stack:
        devices = []
        for number, core in enumerate(sorted(os.sched_getaffinity(0))[:2]):
            port = stack.enter_context(process(pinned_worker, core))
            devices += connect(f"127.0.0.1:{port}", first_index=number)
        for device in devices:
            stack.callback(device.close)
        engine = open_engine(model, devices, ctx_size=16384, n_slots=4, n_ubatch=512, max_in_flight=3)
        stack.callback(engine.check_integrity)
        stack.callback(engine.close)
        yield engine


def first_token_s(engine: Engine, prompt: list[int], tag: str) -> tuple[float, float]:
    """Seconds, and rows computed."""
    before = engine.counters()["prompt_rows_total"]
    seconds = ask(engine, [prompt], 1, tag)
    return seconds, engine.counters()["prompt_rows_total"] - before


def measure(model: Path, n_rounds: int) -> list[Figure]:
    rng = np.random.default_rng(8)

    def tokens(n: int) -> list[int]:
        found: list[int] = rng.integers(100, 20_000, n).tolist()
        return found

    figures = []
    n_all = SHARED_TOKENS + OWN_TOKENS
    for name, open_ in (("one device", one_device), ("two workers", two_workers)):
        cold, warm, theirs, computed = [], [], [], 0.0
        with open_(model) as engine, llama(model, 2, 1, n_all + 64) as other:
            first_token_s(engine, tokens(n_all), "warms up")
            first_token_s(engine, tokens(SHARED_TOKENS // 2), "warms up as well")
            for number in range(n_rounds):
                shared = tokens(SHARED_TOKENS)
                theirs.append(other.run([shared + tokens(OWN_TOKENS)], 1))
                cold.append(first_token_s(engine, shared + tokens(OWN_TOKENS), f"cold {number}")[0])
                for again in range(3):
                    seconds, n_rows = first_token_s(engine, shared + tokens(OWN_TOKENS), f"warm {number} {again}")
                    warm.append(seconds)
                    computed = max(computed, n_rows)
        ratios = [b / a for a, b in zip(cold, theirs, strict=True)]
        figures += [
            Figure(f"{name}: tokens computed warm", computed, "", OWN_TOKENS + MOST_EXTRA_TOKENS, at_least=False),
            Figure(f"{name}: cold", min(cold) * 1e3, "ms"),
            Figure(f"{name}: warm", min(warm) * 1e3, "ms"),
            Figure(f"{name}: cold over warm", float(np.median(cold) / np.median(warm)), "x", 12),
            Figure(f"{name}: llama.cpp {other.version} cold, here, 2 threads", min(theirs) * 1e3, "ms"),
            Figure(f"{name}: llama.cpp's cold over Tandem's", float(np.median(ratios)), "x", 1.0),
        ]
    return figures
