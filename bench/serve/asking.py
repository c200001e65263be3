"""Requests to an engine, all at once and below HTTP."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue

from app.engine.engine import Engine
from app.engine.request import SamplingParams
from bench.rpc import worker_process
from tests.fakes.serving import collect, request, tokens_of

SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)


def ask(engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int, tag: str) -> float:
    """Seconds until all are answered."""

    async def scene() -> list[int]:
        wanted = [
            request(f"{tag}-{i}", prompt, n_tokens, sampling=SAMPLING, cache_prompt=True)
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(collect(engine, one) for one in wanted))
        return [len(tokens_of(events)) for events in answers]

    began = time.perf_counter()
    n_answered = asyncio.run(scene())
    seconds = time.perf_counter() - began
    if n_answered != [n_tokens] * len(prompts):
        raise RuntimeError(f"{n_tokens} tokens were asked for {len(prompts)} times, {n_answered} came")
    return seconds


def pinned_worker(ports: Queue[int], core: int) -> None:
    """A worker of one thread on a core of its own."""
    os.sched_setaffinity(0, {core})
    worker_process(ports, "CPU", True)
