"""The service the API talks to from the first moment: it answers for an engine that may still be loading."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from app.engine.connection import ConnectionStats
from app.engine.engine import Engine
from app.engine.grammar import Grammars
from app.engine.ranking import Ranking
from app.engine.request import GenerateRequest, SamplingParams
from app.engine.service import Embedding, ModelInfo, Phase, ServiceStatus, SlotInfo
from app.engine.stream import EventStream
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.errors import NotReady


class ServiceFront:
    """Implements `InferenceService` by passing calls to an engine once there is one.

    `progress` and `open` are called from the thread that loads; a status is replaced as a whole, so readers need no
    lock.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.template = template
        self.grammars = Grammars(tokenizer)
        self._status = ServiceStatus(phase=Phase.LOADING, detail="loading the model")
        self._engine: Engine | None = None

    def progress(self, fraction: float, seconds_left: float | None, detail: str) -> None:
        self._status = dataclasses.replace(self._status, progress=fraction, seconds_left=seconds_left, detail=detail)

    def open(self, engine: Engine) -> None:
        """The engine stands: from now on it answers."""
        self.info = engine.info
        self._engine = engine

    @property
    def ranking(self) -> Ranking | None:
        return None if self._engine is None else self._engine.ranking

    def status(self) -> ServiceStatus:
        return self._status if self._engine is None else self._engine.status()

    def prepare(self, sampling: SamplingParams) -> None:
        self._ready().prepare(sampling)

    def submit(self, request: GenerateRequest) -> EventStream:
        return self._ready().submit(request)

    def abort(self, request_id: str) -> bool:
        return self._engine is not None and self._engine.abort(request_id)

    def slots(self) -> Sequence[SlotInfo]:
        return () if self._engine is None else self._engine.slots()

    def counters(self) -> Mapping[str, float]:
        return {} if self._engine is None else self._engine.counters()

    def connections(self) -> Sequence[ConnectionStats]:
        return () if self._engine is None else self._engine.connections()

    async def embed(self, prompt: Sequence[int], pooling: str) -> Embedding:
        return await self._ready().embed(prompt, pooling)

    def close(self, drain_s: float) -> None:
        """Admit nothing more; give what runs `drain_s` seconds, then end it with an error. Blocks until it is over."""
        if self._engine is None:
            self._status = ServiceStatus(phase=Phase.DRAINING)
        else:
            self._engine.close(drain_s=drain_s)

    def _ready(self) -> Engine:
        if self._engine is None:
            status = self._status
            percent = f"{status.progress:.0%}"
            raise NotReady(
                f"the model is still loading ({percent}); try again later",
                retry_after_s=max(1.0, status.seconds_left or 1.0),
            )
        return self._engine
