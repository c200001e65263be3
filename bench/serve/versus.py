"""16 requests of 512 + 64 tokens at concurrency 8, greedy, both engines below HTTP and taking turns in one run.

llama.cpp is libllama built for this machine and driven as llama-server drives it (slots, batches of 2,048 with ubatches
of 512, reuse of a slot's own prefix); xllamacpp's wheel lacks this CPU's kernels and would be slower. With the shared
system prompt the first 400 tokens of all requests are the same. Each run starts with nothing cached.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from app.engine.devices.cpu import CpuDevice
from app.engine.engine import Engine
from bench.serve.asking import ask
from bench.serve.llama import llama
from bench.serve.report import Figure
from tests.fakes.serving import open_engine

N_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS, N_SLOTS, SHARED_TOKENS = 16, 512, 64, 8, 400
CTX_SLOT = 640


def prompts(n_shared: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(100, 20_000, n_shared).tolist()
    return [shared + rng.integers(100, 20_000, PROMPT_TOKENS - n_shared).tolist() for _ in range(N_REQUESTS)]


def tandem(model: Path, device: CpuDevice) -> Engine:
    return open_engine(
        model, [device], ctx_size=N_SLOTS * CTX_SLOT, n_slots=N_SLOTS, n_ubatch=512, max_queue=N_REQUESTS
    )


def measure(model: Path, n_rounds: int, n_threads: int = 2) -> list[Figure]:
    figures = []
    n_total = N_REQUESTS * (PROMPT_TOKENS + ANSWER_TOKENS)
    device = CpuDevice("CPU", n_threads)
    engine = tandem(model, device)
    with llama(model, n_threads, N_SLOTS, CTX_SLOT) as other:
        for name, n_shared, target in (("distinct prompts", 0, 1.5), ("400 tokens shared", SHARED_TOKENS, 2.5)):
            ours, theirs = [], []
            for number in range(n_rounds):
                wanted = prompts(n_shared, 100 * n_shared + number)
                theirs.append(other.run(wanted, ANSWER_TOKENS))
                ours.append(ask(engine, wanted, ANSWER_TOKENS, f"{name} {number}"))
            ratio = float(np.median([b / a for a, b in zip(ours, theirs, strict=True)]))
            figures += [
                Figure(f"{name}: Tandem", n_total / min(ours), "tokens/s"),
                Figure(f"{name}: llama.cpp {other.version}", n_total / min(theirs), "tokens/s"),
                Figure(f"{name}: Tandem over llama.cpp", ratio, "x", target),
            ]
    engine.close()
    engine.check_integrity()
    device.close()
    return figures
