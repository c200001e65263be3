"""Asks an engine for answers and keeps what must be the same however they came about."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from app.engine.engine import Engine
from app.engine.request import Delta, Event, SamplingParams, TokenInfo
from tests.fakes.serving import collect, finished, open_engine, request
from tests.fakes.splits import Open, local

T = TypeVar("T")

#: Greedy, to the end of max_tokens, telling how likely the two best tokens of every step were.
TELLING = SamplingParams(temperature=0.0, ignore_eos=True, n_logprobs=2)
#: Differences of log-probabilities that rounding makes when ubatches have other shapes.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Reply:
    """An answer and what it cost. `prompt_rows`: rows the engine computed for prompts meanwhile."""

    infos: tuple[TokenInfo, ...]
    cached: int
    prompt_rows: int

    @property
    def tokens(self) -> list[int]:
        return [info.token for info in self.infos]


class Talker:
    """One engine, asked from outside any event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = count()

    def ask(self, prompt: Sequence[int], n: int = 8, **fields: Any) -> Reply:
        (reply,) = self.run(self.all((prompt, n, fields)))
        return reply

    async def all(self, *wanted: tuple[Sequence[int], int, dict[str, Any]]) -> list[Reply]:
        """Several at once; `prompt_rows` of each are those of all together."""
        before = self.engine.counters()["prompt_rows_total"]
        streams = [self._collect(prompt, n, fields) for prompt, n, fields in wanted]
        answers = await asyncio.gather(*streams)
        rows = int(self.engine.counters()["prompt_rows_total"] - before)
        return [_reply(events, rows) for events in answers]

    def run(self, scene: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(asyncio.wait_for(scene, 120))

    async def _collect(self, prompt: Sequence[int], n: int, fields: dict[str, Any]) -> list[Event]:
        wanted = request(f"r{next(self._numbers)}", prompt, n, **{"sampling": TELLING, **fields})
        return await collect(self.engine, wanted)


def _reply(events: Sequence[Event], prompt_rows: int) -> Reply:
    infos = tuple(info for event in events if isinstance(event, Delta) for info in event.tokens)
    return Reply(infos, finished(events).cached_tokens, prompt_rows)


ONE_DEVICE = local(1)


@contextmanager
def talker(path: Path, devices: Open = ONE_DEVICE, **sizes: Any) -> Iterator[Talker]:
    """A talker over a model on these devices; everything is closed in the end, and checked if the test went well."""
    with ExitStack() as resources:
        opened = devices(resources)
        for device in opened:
            resources.callback(device.close)
        engine = open_engine(path, opened, **{"ctx_size": 1024, "cache_type": "f32", **sizes})
        resources.callback(engine.close)
        yield Talker(engine)
        engine.close()
        engine.check_integrity()


def assert_same(got: Reply, want: Reply, tolerance: float = ROUNDING) -> None:
    """The same greedy answer with the same log-probabilities.

    Where they part, the two best tokens must have been as close as rounding; what follows says nothing then.
    """
    assert len(got.infos) == len(want.infos)
    for step, (one, other) in enumerate(zip(got.infos, want.infos, strict=True)):
        if one.token != other.token:
            first, second = (candidate.logprob for candidate in other.top)
            assert first - second <= 2 * tolerance, f"step {step}: {one.token} instead of {other.token}"
            return
        assert one.logprob is not None and other.logprob is not None
        assert abs(one.logprob - other.logprob) <= tolerance, f"step {step}: log-probabilities differ"
