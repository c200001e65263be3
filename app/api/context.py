"""What every route needs: the service, the options, and threads for work that would hold up the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Depends, Request

from app.api.options import ApiOptions
from app.api.responses.store import ResponseStore
from app.engine.service import InferenceService, Phase, ServiceStatus
from app.engine.text.grammar_parts import Marks
from app.engine.text.reasoning import ReasoningFormat, format_of
from app.engine.text.turns import TurnMarks
from app.errors import NotFound, NotReady

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class Loading(NotReady):
    """The model is not there yet; `loading` says how far it is."""

    def __init__(self, status: ServiceStatus) -> None:
        left = status.seconds_left
        when = "" if left is None else f", about {left:.0f} s left"
        super().__init__(
            f"the model is loading: {status.detail or 'starting'}, {status.progress:.0%} done{when}",
            retry_after_s=1.0 if left is None else min(max(left, 1.0), 60.0),
        )
        self.code = "loading"
        self.loading = {"detail": status.detail, "progress": status.progress, "eta_seconds": left}


@dataclass(frozen=True, slots=True)
class VocabularyMarks:
    """Names tags in grammars in Lark's notation."""

    tokenizer: Tokenizer

    def literal(self, tag: str) -> str:
        """By its token, or as text where it has none."""
        token = self.tokenizer.token_id(tag)
        return json.dumps(tag, ensure_ascii=False) if token is None else f"<[{token}]>"

    def is_control(self, tag: str) -> bool:
        token = self.tokenizer.token_id(tag)
        return token is not None and self.tokenizer.is_control(token)


@dataclass(frozen=True)
class Api:
    """Shared by all routes of one app."""

    service: InferenceService
    options: ApiOptions
    threads: CapacityLimiter
    cancels: dict[str, Callable[[], None]] = field(default_factory=dict)  # by request id, while it runs

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run pure text work (templates, tokenizing) off the event loop."""
        return await anyio.to_thread.run_sync(work, limiter=self.threads)

    def check_model(self, requested: str | None) -> str:
        """The name to answer under. Raises NotFound for a model we do not serve, NotReady while there is none."""
        self.check_loaded()
        info = self.service.info
        if requested in (info.alias, info.name):
            return requested or info.alias
        if requested and not self.options.any_model:
            raise NotFound(
                f"the model {requested!r} does not exist here; this server has {info.alias!r}",
                param="model",
                code="model_not_found",
            )
        return info.alias

    def check_loaded(self) -> None:
        """Raise NotReady unless there is a model to ask."""
        status = self.service.status()
        if status.phase is Phase.LOADING:
            raise Loading(status)
        if status.phase is Phase.FAILED:
            raise NotReady(f"the model could not be served: {status.detail}", retry_after_s=30)

    @cached_property
    def thinking(self) -> ReasoningFormat | None:
        """How the loaded model marks its thoughts. From the first look on, its tags show in answers."""
        family = format_of(self.service.template.source)
        if family is not None:
            self.service.tokenizer.show_always(family.markers)
        return family

    @cached_property
    def responses(self) -> ResponseStore:
        """What is kept of responses. Belongs to the event loop."""
        limits = self.options.limits
        return ResponseStore(limits.stored_responses, limits.stored_bytes)

    @property
    def answers_in_messages(self) -> bool:
        """Whether the loaded model's answers are rows of messages with headers, as gpt-oss writes them."""
        return self.thinking is not None and self.thinking.name == "harmony"

    @cached_property
    def marks(self) -> Marks:
        """How the loaded model's vocabulary has the tags of calls and messages."""
        return VocabularyMarks(self.service.tokenizer)

    @cached_property
    def turn_marks(self) -> TurnMarks:
        """Finds the turns in prompts of the loaded model."""
        return TurnMarks(self.service.template, self.service.tokenizer)

    @property
    def fingerprint(self) -> str:
        return f"tandem-{self.options.version}"


def api_of(request: Request) -> Api:
    api = request.app.state.api
    assert isinstance(api, Api)
    return api


ApiDep = Annotated[Api, Depends(api_of)]
