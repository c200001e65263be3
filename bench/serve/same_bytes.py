"""Same bytes, the larger run: every request gets what it gets alone and cold, whatever else is different.

Tokens, log-probabilities and a hash of every row of logits that a token was drawn from are compared.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from app.engine.device import Device
from app.engine.engine import Engine
from app.engine.executor import Executor, Running
from app.engine.ggml import GGMLType
from app.engine.request import GenerateRequest, SamplingParams
from app.engine.rows import RowWish
from app.engine.serving.types import OutputKind, Ubatch
from bench.serve.report import Figure
from tests.fakes.crowd import Answer, alone, answers, local, mixed, serving
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import request

Rows = dict[tuple[str, int], bytes]


class RecordingExecutor(Executor):
    """Keeps a hash of every row that a token is drawn from, by request and position; so it needs them whole."""

    seen: Rows = {}

    def submit(self, ubatch: Ubatch, wishes: Sequence[RowWish] = (), *, hidden: bool = False) -> Running:
        running = super().submit(ubatch, hidden=hidden)

        def record(done: Future[Any]) -> None:
            if ubatch.outputs and done.exception() is None:
                for output, row in zip(ubatch.outputs, running.rows(), strict=True):
                    if output.kind is OutputKind.SAMPLE:
                        digest = blake2b(row.values.tobytes(), digest_size=16).digest()
                        self.seen[output.request_id, output.position] = digest

        running.done.add_done_callback(record)
        return running


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve them all. `check` says what must have happened for the way to count."""

    name: str
    run: Callable[[Engine, Sequence[GenerateRequest]], dict[str, Answer]] = answers
    devices: Callable[[ExitStack], list[Device]] = local(1, 2)
    sizes: dict[str, Any] = field(default_factory=dict)
    shuffled: bool = False
    shortest_first: bool = False
    whole_rows: bool = True
    must_count: tuple[str, ...] = ()


def twice(engine: Engine, wanted: Sequence[GenerateRequest]) -> dict[str, Answer]:
    """Cold, and then again from the cache."""
    first = answers(engine, wanted)
    second = answers(engine, wanted)
    return second if first == second else {}


def cold(engine: Engine, wanted: Sequence[GenerateRequest]) -> dict[str, Answer]:
    return answers(engine, [replace(one, cache_prompt=False) for one in wanted])


ROOMY: dict[str, Any] = {"ctx_size": 1 << 16, "n_slots": 16, "n_ubatch": 512, "max_queue": 64, "max_in_flight": 3}
#: With short prompts first, many grow together to more than there is.
TIGHT = {"ctx_size": 2304, "n_slots": 16}
WAS_TIGHT = ("preemptions_total", "blocks_moved_total")
WAYS = [
    Way("all at once"),
    Way("all at once, nothing cached", cold),
    Way("in another order", shuffled=True),
    *(Way(f"ubatches of {n}", sizes={"n_ubatch": n}) for n in (1, 7, 64)),
    Way("twice, the second time warm", twice, must_count=("cached_tokens_total",)),
    Way("best tokens of rows alone", whole_rows=False),
    Way("best tokens of rows alone, from behind the wire", devices=mixed, whole_rows=False),
    Way("one thread", devices=local(1, 1)),
    Way("two devices", devices=local(2)),
    Way("three devices, ubatches of 64", devices=local(3), sizes={"n_ubatch": 64}),
    Way("one device here, one behind the wire", devices=mixed),
    Way("preempted and compacted", sizes=TIGHT, shortest_first=True, must_count=WAS_TIGHT),
    Way(
        "preempted, two devices, ubatches of 48",
        devices=local(2),
        sizes={**TIGHT, "n_ubatch": 48},
        shortest_first=True,
        must_count=WAS_TIGHT,
    ),
]
REAL_WAYS = [way for way in WAYS if way.name in ("all at once", "two devices", "twice, the second time warm")]


def requests(n: int, longest: int, seed: int, first_token: int, last_token: int) -> list[GenerateRequest]:
    """Prompts of 1 to `longest` tokens, every third one beginning as another does; greedy and seeded."""
    rng = random.Random(seed)
    shared = [rng.randrange(first_token, last_token) for _ in range(longest)]
    wanted = []
    for number in range(n):
        length = max(1, min(longest, round(longest ** rng.random())) if number % 2 else rng.randint(1, longest))
        n_shared = rng.randrange(length) if number % 3 == 0 else 0
        prompt = shared[:n_shared] + [rng.randrange(first_token, last_token) for _ in range(length - n_shared)]
        temperature = 0.0 if number % 2 else 1.1
        sampling = SamplingParams(temperature=temperature, seed=number, n_logprobs=2, ignore_eos=True)
        n_answer = rng.randint(100, 200) if number % 4 == 1 else rng.randint(4, 40)
        wanted.append(request(f"r{number}", prompt, min(n_answer, 2040 - length), sampling=sampling))
    return wanted


def serve(model: Path, way: Way, wanted: list[GenerateRequest], cache_type: str) -> tuple[dict[str, Answer], Rows]:
    """Answers and rows; nothing when what the way is about did not happen."""
    RecordingExecutor.seen = rows = {}
    if way.shuffled:
        wanted = random.Random(3).sample(wanted, len(wanted))
    if way.shortest_first:
        wanted = sorted(wanted, key=lambda one: len(one.prompt))
    sizes = {**ROOMY, **way.sizes}
    executor = RecordingExecutor if way.whole_rows else Executor
    with serving(model, way.devices, cache_type=cache_type, executor=executor, **sizes) as engine:
        found = way.run(engine, wanted)
        counters = engine.counters()
    missing = [name for name in way.must_count if not counters[name]]
    if missing:
        print(f"  {way.name}: this never happened: {', '.join(missing)}", flush=True)
        return {}, {}
    return found, rows


def compare(model: Path, ways: Sequence[Way], wanted: list[GenerateRequest], cache_type: str) -> list[Figure]:
    figures = []
    expected, expected_rows = serve(model, Way("alone", alone), wanted, cache_type)
    for way in ways:
        began = time.perf_counter()
        found, rows = serve(model, way, wanted, cache_type)
        n_same = sum(found.get(one.id) == expected[one.id] for one in wanted)
        n_rows = sum(rows.get(key) == digest for key, digest in expected_rows.items())
        print(f"  {cache_type}, {way.name}: {time.perf_counter() - began:.1f} s", flush=True)
        figures.append(Figure(f"{cache_type}, {way.name}: same answers", n_same, f"of {len(wanted)}", len(wanted)))
        if way.whole_rows:
            figures.append(
                Figure(f"{cache_type}, {way.name}: same rows of logits", n_rows, f"of {len(rows)}", len(expected_rows))
            )
    return figures


def tiny(n: int = 64, longest: int = 2000) -> list[Figure]:
    """The whole matrix, with a model of random weights."""
    wanted = requests(n, longest, 11, 33, 120)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        shape = TinyLlama.of_type(GGMLType.Q4_K, n_layers=3, n_heads=2, n_kv_heads=1, n_ctx=4096)
        write_tiny_llama(path, shape)
        return [figure for cache_type in ("f16", "q8_0") for figure in compare(path, WAYS, wanted, cache_type)]


def real(model: Path, n: int = 10, longest: int = 300) -> list[Figure]:
    """A part of it, with a real model."""
    return compare(model, REAL_WAYS, requests(n, longest, 12, 100, 20_000), "f16")
