"""One choice as it grows: its text, its tokens, and how it ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from app.api.errors import Cancelled
from app.api.generation import FINISH_REASONS
from app.engine.request import Delta, Event, Finished, FinishReason, Started, TokenInfo
from app.engine.service import GenerationStream
from app.errors import InternalError

#: A field of the message and text to append to it.
Piece = tuple[str, str]


@dataclass(slots=True)
class Choice:
    """What has come of one choice. `keep_tokens` False leaves `tokens` empty."""

    index: int
    keep_tokens: bool = False
    texts: dict[str, list[str]] = field(default_factory=dict)
    tokens: list[TokenInfo] = field(default_factory=list)
    n_reasoning: int = 0
    finished: Finished | None = None

    def push(self, delta: Delta) -> Sequence[Piece]:
        """Take new text; returns what of it is sure by now."""
        if self.keep_tokens:
            self.tokens.extend(delta.tokens)
        return (("content", delta.text),) if delta.text else ()

    def end(self, finished: Finished) -> Sequence[Piece]:
        """Take the last event; returns text that was held back."""
        self.finished = finished
        return ()

    def text(self, name: str) -> str:
        return "".join(self.texts.get(name, ()))

    async def collect(self, stream: GenerationStream) -> Choice:
        """Read the stream to its end."""
        async for event in events(stream):
            if isinstance(event, Delta):
                pieces = self.push(event)
            elif isinstance(event, Finished):
                pieces = self.end(event)
            else:
                continue
            for name, text in pieces:
                self.texts.setdefault(name, []).append(text)
        return self

    @property
    def ending(self) -> Finished:
        if self.finished is None:
            raise InternalError("an answer ended without a last event")
        return self.finished

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS[self.ending.reason]


async def events(stream: GenerationStream) -> AsyncIterator[Event]:
    """The stream's events. Raises Cancelled when someone stopped it by its id."""
    async for event in stream:
        if isinstance(event, Finished) and event.reason is FinishReason.ABORT:
            raise Cancelled("the request was cancelled before its answer was complete")
        yield event


__all__ = ["Choice", "Piece", "Started", "events"]
