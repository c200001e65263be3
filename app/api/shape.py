"""What an answer is called and which optional parts it has, whatever its dialect."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.api.choice import CallPiece, Choice, Piece
from app.api.context import Api
from app.api.schemas.sampling import GenerationFields
from app.api.stream import sse
from app.api.usage import prompt_progress, timings
from app.engine.request import Progress, TokenInfo
from app.errors import InternalError

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Decided once per request. `n_top` None: no logprobs; 0: of the chosen tokens alone."""

    id: str
    object: str
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    n_prompt: int
    n_top: int | None = None
    return_tokens: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    created_unix: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        """What every object of the answer begins with."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created_unix,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    @property
    def tells_tokens(self) -> bool:
        """Whether something is asked to be told of each token."""
        return self.return_tokens or self.n_top is not None


def shape_of(
    body: GenerationFields,
    api: Api,
    *,
    id: str,
    object: str,
    n_prompt: int,
    n_top: int | None,
    include_usage: bool = False,
) -> Shape:
    """The shape of the answer to a request for the loaded model. Raises NotFound for a model that is not here."""
    return Shape(
        id=id,
        object=object,
        model=api.check_model(body.model),
        fingerprint=api.fingerprint,
        tokenizer=api.service.tokenizer,
        n_prompt=n_prompt,
        n_top=n_top,
        return_tokens=bool(body.return_tokens),
        include_usage=include_usage,
        timings_per_token=bool(body.timings_per_token),
    )


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Chunks(ABC):
    """Makes the events of one choice of a stream. What is the same in all of them is serialised once."""

    def __init__(self, shape: Shape, index: int) -> None:
        self.shape = shape
        self.index = index
        self._head = shape.head()
        #: Whether a text event is text and nothing else.
        self.plain = not (shape.tells_tokens or shape.timings_per_token)

    @abstractmethod
    def text(self, name: str, text: str, tokens: Sequence[TokenInfo], choice: Choice) -> bytes:
        """New text of one field, with what is asked to be told of its tokens."""

    def call(self, step: CallPiece, tokens: Sequence[TokenInfo], choice: Choice) -> bytes:
        """A step of a call, in dialects that have calls."""
        raise InternalError(f"a call in an answer of kind {self.shape.object}, which has none")

    def piece(self, piece: Piece, tokens: Sequence[TokenInfo], choice: Choice) -> bytes:
        """New text or a step of a call."""
        if isinstance(piece, CallPiece):
            return self.call(piece, tokens, choice)
        return self.text(*piece, tokens, choice)

    @abstractmethod
    def empty(self, finish_reason: str | None) -> dict[str, Any]:
        """A choice without new text."""

    def start(self) -> bytes:
        """What comes before any text."""
        return b""

    @property
    def needs_all(self) -> bool:
        """Whether nothing can be told before the end is known; then `whole` tells it."""
        return False

    def whole(self, choice: Choice) -> bytes:
        """All of a finished choice, for `needs_all`."""
        return self.start() + self.text("content", choice.text(), choice.tokens, choice) + self.end(choice)

    def progress(self, progress: Progress) -> bytes:
        return self.event(self.empty(None), prompt_progress=prompt_progress(progress))

    def end(self, choice: Choice) -> bytes:
        return self.event(self.empty(choice.finish_reason), timings=timings(choice.ending.timings))

    def event(self, choice: Mapping[str, Any], **extra: Any) -> bytes:
        """One event with one choice; `usage` is null in it where a usage event will follow."""
        usage_null = {"usage": None} if self.shape.include_usage else {}
        return sse({**self._head, "choices": [choice], **usage_null, **extra})

    def constant(self, before_text: str, after_text: str) -> tuple[str, str]:
        """The parts of a plain text event around the text."""
        usage_null = ',"usage":null' if self.shape.include_usage else ""
        before = f'data: {compact(self._head)[:-1]},"choices":[{{"index":{self.index},{before_text}'
        return before, f'{after_text},"logprobs":null,"finish_reason":null}}]{usage_null}}}\n\n'

    def extra_timings(self, choice: Choice) -> dict[str, Any]:
        return {"timings": timings(choice.timings_so_far())} if self.shape.timings_per_token else {}
