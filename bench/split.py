"""What splitting over workers gains and costs: one and two workers of one pinned thread each, beside the local device.

`python -m bench.split [--model FILE.gguf] [--link-ms 5] [--trace out.json]` runs the real engine over real workers on
loopback, all in turns in one run, and compares with the bound of a pipeline: n ubatches over S equal stages take
(n + S - 1) / (S n) of one stage's time. Answers must be the same bytes everywhere. Stop everything else: the machine
needs a core for each worker, and what the control plane does comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np

from app import models_store
from app.engine.devices.cpu import CpuDevice
from app.engine.engine import Engine
from app.engine.request import SamplingParams
from app.engine.trace import Trace
from app.rpc.connect import connect
from bench.delay_proxy import DelayProxy
from bench.rpc import process, worker_process
from tests.fakes.serving import collect, open_engine, request, tokens_of

PROMPT_TOKENS, DECODE_TOKENS = 2048, 48
N_STREAMS, STREAM_TOKENS = 16, 24
N_REQUESTS, REQUEST_PROMPT, REQUEST_TOKENS = 8, 512, 64
N_SLOTS = 16
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, n_logprobs=0)


def pinned_worker(ports: Queue[int], core: int) -> None:
    os.sched_setaffinity(0, {core})
    worker_process(ports, "CPU", True)


@dataclass(slots=True)
class Setup:
    """One engine, and the seconds and answers of each task in every round."""

    engine: Engine
    trace: Trace | None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    n_ubatches: dict[str, float] = field(default_factory=dict)


@contextmanager
def setup(model: str, n_workers: int, link_s: float, trace: Trace | None) -> Iterator[Setup]:
    """An engine over so many workers, 0: over a device of one thread here."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        devices = []
        for number in range(n_workers):
            port = stack.enter_context(process(pinned_worker, cores[number % len(cores)]))
            if link_s:
                proxy = DelayProxy(("127.0.0.1", port), link_s)
                stack.callback(proxy.close)
                port = proxy.port
            devices += connect(f"127.0.0.1:{port}", first_index=number)
        made = devices or [CpuDevice("CPU", 1)]
        for device in made:
            stack.callback(device.close)
        path = Path(model)
        engine = open_engine(
            path, made, ctx_size=16384, n_slots=N_SLOTS, n_ubatch=512, max_queue=64, max_in_flight=len(made) + 1,
            trace=trace,
        )  # fmt: skip
        stack.callback(engine.close)
        if trace is not None:
            trace.stage_names = [device.name for device in made]
        yield Setup(engine, trace)


def run(engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int, tag: str) -> tuple[float, list[list[int]]]:
    """Seconds until all are answered, and the answers."""

    async def scene() -> list[list[int]]:
        wanted = [
            request(f"{tag}-{i}", prompt, n_tokens, sampling=SAMPLING, cache_prompt=False)
            for i, prompt in enumerate(prompts)
        ]
        return [tokens_of(events) for events in await asyncio.gather(*(collect(engine, one) for one in wanted))]

    began = time.perf_counter()
    answers = asyncio.run(scene())
    return time.perf_counter() - began, answers


def tasks() -> dict[str, Callable[[Engine, str], tuple[float, list[list[int]]]]]:
    rng = np.random.default_rng(5)

    def prompts(n: int, length: int) -> list[list[int]]:
        return [[int(token) for token in rng.integers(100, 5000, length)] for _ in range(n)]

    long, short = prompts(1, PROMPT_TOKENS), prompts(1, 8)
    streams, requests = prompts(N_STREAMS, 8), prompts(N_REQUESTS, REQUEST_PROMPT)
    return {
        f"prompt of {PROMPT_TOKENS}": lambda engine, tag: run(engine, long, 1, tag),
        f"decode of {DECODE_TOKENS}": lambda engine, tag: run(engine, short, DECODE_TOKENS, tag),
        f"{N_STREAMS} streams of {STREAM_TOKENS}": lambda engine, tag: run(engine, streams, STREAM_TOKENS, tag),
        f"{N_REQUESTS} x ({REQUEST_PROMPT} + {REQUEST_TOKENS})": lambda engine, tag: run(
            engine, requests, REQUEST_TOKENS, tag
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--link-ms", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, default=None, help="trace of the two workers")
    parser.add_argument("--tasks", default="", help="only those whose names hold this")
    given = parser.parse_args()
    model = str(models_store.resolve(given.model))
    trace = None if given.trace is None else Trace(given.trace)
    with ExitStack() as stack:
        if trace is not None:
            stack.callback(trace.save)
        setups = {
            name: stack.enter_context(setup(model, n, given.link_ms / 1e3, trace if n == 2 else None))
            for name, n in (("local", 0), ("one worker", 1), ("two workers", 2))
        }
        for task, do in tasks().items():
            if given.tasks not in task:
                continue
            for round_ in range(given.rounds + 1):  # the first one warms up
                for made in setups.values():
                    before = made.engine.counters()["ubatches_total"]
                    seconds, answers = do(made.engine, f"{task}-{round_}")
                    made.n_ubatches[task] = made.engine.counters()["ubatches_total"] - before
                    made.answers[task] = answers
                    if round_:
                        made.seconds.setdefault(task, []).append(seconds)
            show(task, setups)


def show(task: str, setups: dict[str, Setup]) -> None:
    best = {name: min(made.seconds[task]) for name, made in setups.items()}
    same = all(made.answers[task] == setups["local"].answers[task] for made in setups.values())
    n = setups["two workers"].n_ubatches[task]
    gain, bound = best["one worker"] / best["two workers"], 2 * n / (n + 1)
    times = ", ".join(f"{name} {value:.3f} s" for name, value in best.items())
    print(
        f"{task}: {times}; two over one {gain:.2f}, one over local {best['local'] / best['one worker']:.2f}", end="; "
    )
    print(f"{n:.0f} ubatches", end=f", bound {bound:.2f}, {gain / bound:.2f} of it; " if "prompt" in task else "; ")
    print("same bytes" if same else "OTHER BYTES", flush=True)


if __name__ == "__main__":
    main()
