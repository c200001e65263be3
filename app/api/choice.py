"""One choice as it grows: its text, its tokens, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.api.errors import Cancelled
from app.engine.request import Delta, Finished, FinishReason, Started, Timings, TokenInfo
from app.engine.service import GenerationStream
from app.engine.text.fields import Field
from app.engine.text.reasoning import Parser
from app.errors import InternalError

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

#: Calls of tools that nobody offered are text like any other.
FIELD_NAMES = {Field.CONTENT: "content", Field.REASONING: "reasoning_content", Field.CALL: "content"}

#: A field of the message and text to append to it.
Piece = tuple[str, str]


@dataclass(slots=True)
class Choice:
    """What has come of one choice. `tokens` are kept for whole answers that tell of them; `parser` finds thoughts."""

    index: int
    keep_tokens: bool = False
    parser: Parser | None = None
    texts: dict[str, list[str]] = field(default_factory=dict)
    tokens: list[TokenInfo] = field(default_factory=list)
    n_tokens: int = 0
    n_reasoning: int = 0
    n_undecided: int = 0  # tokens whose text is held back: it is not clear yet what they are
    started: Started | None = None
    finished: Finished | None = None
    started_s: float = 0.0
    first_token_s: float = 0.0

    def start(self, started: Started) -> None:
        """Take the first event."""
        self.started = started
        self.started_s = time.monotonic()

    def push(self, delta: Delta) -> Sequence[Piece]:
        """Take new text; returns what of it is sure by now."""
        if not self.n_tokens:
            self.first_token_s = time.monotonic()
        self.n_tokens += len(delta.tokens)
        if self.keep_tokens:
            self.tokens.extend(delta.tokens)
        if self.parser is None:
            return (("content", delta.text),) if delta.text else ()
        self.n_undecided += len(delta.tokens)
        return self._sorted(self.parser.push(delta.text))

    def end(self, finished: Finished) -> Sequence[Piece]:
        """Take the last event; returns text that was held back. Raises Cancelled when someone stopped it by its id."""
        if finished.reason is FinishReason.ABORT:
            raise Cancelled("the request was cancelled before its answer was complete")
        self.finished = finished
        return () if self.parser is None else self._sorted(self.parser.finish())

    def _sorted(self, parsed: Sequence[tuple[Field, str]]) -> Sequence[Piece]:
        """Parsed text under the names of message fields; counts the tokens of thoughts."""
        if parsed:
            if parsed[-1][0] is Field.REASONING:
                self.n_reasoning += self.n_undecided
            self.n_undecided = 0
        return [(FIELD_NAMES[field], text) for field, text in parsed]

    def text(self, name: str = "content") -> str:
        return "".join(self.texts.get(name, ()))

    async def collect(self, stream: GenerationStream) -> Choice:
        """Read the stream to its end."""
        async for event in stream:
            match event:
                case Delta():
                    self._append(self.push(event))
                case Started():
                    self.start(event)
                case Finished():
                    self._append(self.end(event))
        return self

    def _append(self, pieces: Sequence[Piece]) -> None:
        for name, text in pieces:
            self.texts.setdefault(name, []).append(text)

    @property
    def ending(self) -> Finished:
        if self.finished is None:
            raise InternalError("an answer ended without a last event")
        return self.finished

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS[self.ending.reason]

    def timings_so_far(self) -> Timings:
        """Measured here, between the events that have come."""
        started = self.started or Started(prompt_tokens=0, cached_tokens=0)
        return Timings(
            cache_n=started.cached_tokens,
            prompt_n=started.prompt_tokens - started.cached_tokens,
            prompt_ms=1e3 * (self.first_token_s - self.started_s),
            predicted_n=self.n_tokens,
            predicted_ms=1e3 * (time.monotonic() - self.first_token_s),
        )
