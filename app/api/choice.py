"""One choice as it grows: its text, its tokens, and how it ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.api.errors import Cancelled
from app.engine.request import Delta, Finished, FinishReason, Started, Timings, TokenInfo
from app.engine.service import GenerationStream
from app.engine.text.calls.base import CallArguments
from app.engine.text.fields import Field
from app.engine.text.reasoning import Parser
from app.engine.text.tool_calls import CallParser, Told
from app.errors import InternalError

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

#: Where no tools are offered, calls are text like any other.
FIELD_NAMES = {Field.CONTENT: "content", Field.REASONING: "reasoning_content", Field.CALL: "content"}


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A step of the call number `index`: its id and name in its first piece, and text to append to its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


#: A field of the message and text to append to it, or a step of a call.
Piece = tuple[str, str] | CallPiece


@dataclass(slots=True)
class ToldCall:
    """A call as far as it is known. Its arguments are JSON once the answer is whole."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Choice:
    """What has come of one choice. `tokens` are kept for whole answers that tell of them; `parser` finds thoughts."""

    index: int
    keep_tokens: bool = False
    parser: Parser | None = None
    call_parser: CallParser | None = None
    calls: list[ToldCall] = field(default_factory=list)
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
        if self.parser is None and self.call_parser is None:
            return (("content", delta.text),) if delta.text else ()
        self.n_undecided += len(delta.tokens)
        return self._sorted(self._parsed(delta.text))

    def end(self, finished: Finished) -> Sequence[Piece]:
        """Take the last event; returns text that was held back. Raises Cancelled when someone stopped it by its id."""
        if finished.reason is FinishReason.ABORT:
            raise Cancelled("the request was cancelled before its answer was complete")
        self.finished = finished
        pieces = [] if self.parser is None else self._sorted(self.parser.finish())
        return pieces if self.call_parser is None else [*pieces, *self._told(self.call_parser.finish())]

    def _parsed(self, text: str) -> Sequence[tuple[Field, str]]:
        return [(Field.CONTENT, text)] if self.parser is None else self.parser.push(text)

    def _sorted(self, parsed: Sequence[tuple[Field, str]]) -> list[Piece]:
        """Parsed text under the names of message fields; counts the tokens of thoughts."""
        if parsed:
            if parsed[-1][0] is Field.REASONING:
                self.n_reasoning += self.n_undecided
            self.n_undecided = 0
        calls = self.call_parser
        if calls is None:
            return [(FIELD_NAMES[field], text) for field, text in parsed]
        pieces: list[Piece] = []
        for kind, text in parsed:
            if kind is Field.REASONING:
                pieces.append((FIELD_NAMES[kind], text))
            else:
                pieces += self._told(calls.push_call(text) if kind is Field.CALL else calls.push(text))
        return pieces

    def _told(self, found: Sequence[Told]) -> Sequence[Piece]:
        """Text and calls as a stream tells them: a call's name first, then its arguments."""
        pieces: list[Piece] = []
        for item in found:
            if isinstance(item, str):
                pieces.append(("content", item))
            elif isinstance(item, CallArguments):
                self.calls[-1].parts.append(item.text)
                pieces.append(CallPiece(len(self.calls) - 1, item.text))
            else:
                is_new = item.id is not None and all(call.id != item.id for call in self.calls)
                call = ToldCall(item.id if is_new and item.id else self._new_call_id(), item.name)
                self.calls.append(call)
                pieces.append(CallPiece(len(self.calls) - 1, id=call.id, name=call.name))
        return pieces

    def _new_call_id(self) -> str:
        n_chars = None if self.call_parser is None else self.call_parser.id_chars
        return uuid.uuid4().hex[:n_chars] if n_chars is not None else f"call_{uuid.uuid4().hex[:24]}"

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
        for piece in pieces:
            if not isinstance(piece, CallPiece):
                self.texts.setdefault(piece[0], []).append(piece[1])

    @property
    def ending(self) -> Finished:
        if self.finished is None:
            raise InternalError("an answer ended without a last event")
        return self.finished

    @property
    def finish_reason(self) -> str:
        reason = FINISH_REASONS[self.ending.reason]
        return "tool_calls" if self.calls and reason == "stop" else reason

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
