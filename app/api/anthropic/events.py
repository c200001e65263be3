"""An answer as Anthropic tells it: blocks, one after the other, each opened, filled and closed.

A stream sends these events; a whole answer is what they add up to. So both say the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from app.api.anthropic.blocks import SIGNATURE, sealed
from app.api.choice import CallPiece, Choice, Piece
from app.api.shape import Shape
from app.engine.request import Delta, Finished, FinishReason, Progress, Started
from app.engine.service import GenerationStream

Event = dict[str, Any]
#: Takes events that became known at the same time.
Tell = Callable[[Sequence[Event]], Awaitable[None]]

#: By the type of a block: what stands in it when it is opened, the type of its deltas, and their field.
KINDS: Mapping[str, tuple[Event, str, str]] = {
    "text": ({"text": ""}, "text_delta", "text"),
    "thinking": ({"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_use": ({"input": {}}, "input_json_delta", "partial_json"),
}
BLOCK_OF = {"content": "text", "reasoning_content": "thinking"}


class Blocks:
    """Sorts the pieces of an answer into blocks. `hides_thoughts`: they are told in their signatures only."""

    def __init__(self, *, hides_thoughts: bool = False) -> None:
        self._hides_thoughts = hides_thoughts
        self._n_blocks = 0
        self._open: str | None = None
        self._hidden: list[str] = []
        self._spaces = ""  # white space in front of text, which is no block by itself

    def take(self, piece: Piece) -> Iterator[Event]:
        """The events of one more piece."""
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                yield from self._begin("tool_use", id=piece.id, name=piece.name)
            yield from self._fill("tool_use", piece.arguments)
            return
        name, text = piece
        kind = BLOCK_OF[name]
        if self._open != kind:
            if kind == "text":
                self._spaces += text
                if not self._spaces.strip():
                    return
                text, self._spaces = self._spaces, ""
            yield from self._begin(kind)
        if kind == "thinking" and self._hides_thoughts:
            self._hidden.append(text)
        else:
            yield from self._fill(kind, text)

    def finish(self) -> Iterator[Event]:
        """Close the last block. An answer of nothing but white space is that."""
        if self._spaces and not self._n_blocks:
            yield from self._begin("text")
            yield from self._fill("text", self._spaces)
        yield from self._close()

    def _begin(self, kind: str, **more: Any) -> Iterator[Event]:
        yield from self._close()
        self._open, self._spaces = kind, ""
        block = {"type": kind, **more, **KINDS[kind][0]}
        yield {"type": "content_block_start", "index": self._n_blocks, "content_block": block}
        self._n_blocks += 1

    def _fill(self, kind: str, text: str) -> Iterator[Event]:
        if text:
            _, delta, field = KINDS[kind]
            yield self._delta({"type": delta, field: text})

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            signature = sealed("".join(self._hidden)) if self._hides_thoughts else SIGNATURE
            self._hidden.clear()
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._n_blocks - 1}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._n_blocks - 1, "delta": delta}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How one answer is told. `max_tokens` is what the request allows."""

    shape: Shape
    max_tokens: int | None
    hides_thoughts: bool


async def pump(choice: Choice, stream: GenerationStream, wording: Wording, tell: Tell) -> Choice:
    """Tell one answer from its first event to its last."""
    blocks = Blocks(hides_thoughts=wording.hides_thoughts)
    async for event in stream:
        match event:
            case Delta():
                if found := [told for piece in choice.push(event) for told in blocks.take(piece)]:
                    await tell(found)
            case Started():
                choice.start(event)
                await tell([{"type": "message_start", "message": opening(wording.shape, event)}])
            case Progress():
                pass  # nothing in this dialect tells of it
            case Finished():
                last = [told for piece in choice.end(event) for told in blocks.take(piece)]
                await tell([*last, *blocks.finish(), ending(choice, wording), {"type": "message_stop"}])
    return choice


def opening(shape: Shape, started: Started) -> Event:
    """The message before anything is in it."""
    return {
        "id": shape.id,
        "type": "message",
        "role": "assistant",
        "model": shape.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(shape.n_prompt, started.cached_tokens, 0, 0),
    }


def ending(choice: Choice, wording: Wording) -> Event:
    finished = choice.ending
    reason = stop_reason(choice, wording.max_tokens)
    stop_sequence = finished.stop_string if reason == "stop_sequence" else None
    return {
        "type": "message_delta",
        "delta": {"stop_reason": reason, "stop_sequence": stop_sequence},
        "usage": usage(wording.shape.n_prompt, finished.cached_tokens, finished.completion_tokens, choice.n_reasoning),
    }


def stop_reason(choice: Choice, max_tokens: int | None) -> str:
    """Why it ended. What was called must be answered, whatever ended the answer behind it."""
    finished = choice.ending
    if finished.reason is FinishReason.LENGTH:
        is_cut = max_tokens is not None and finished.completion_tokens >= max_tokens
        return "max_tokens" if is_cut else "model_context_window_exceeded"
    if choice.calls:
        return "tool_use"
    return "end_turn" if finished.stop_string is None else "stop_sequence"


def usage(n_prompt: int, n_cached: int, n_output: int, n_thinking: int) -> dict[str, Any]:
    """Of the prompt, `input_tokens` are those that had to be computed. Nothing is written to a cache at a price."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_output,
        "output_tokens_details": {"thinking_tokens": n_thinking},
    }


class Whole:
    """Adds up the events of an answer."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self._parts: list[str] = []

    async def tell(self, events: Sequence[Event]) -> None:
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event["type"]:
            case "message_start":
                self.message = event["message"]
            case "content_block_start":
                self.message["content"].append(dict(event["content_block"]))
                self._parts = []
            case "content_block_delta":
                self._add(event["delta"])
            case "content_block_stop":
                self._complete(self.message["content"][-1])
            case "message_delta":
                self.message.update(**event["delta"], usage=event["usage"])

    def _add(self, delta: Event) -> None:
        if delta["type"] == "signature_delta":
            self.message["content"][-1]["signature"] = delta["signature"]
        else:
            self._parts.append(delta[next(field for _, kind, field in KINDS.values() if kind == delta["type"])])

    def _complete(self, block: Event) -> None:
        text = "".join(self._parts)
        if block["type"] == "tool_use":  # an answer that was cut off may end in the middle of its arguments
            block["input"] = from_json(text, allow_partial=True) if text else {}
        else:
            block[block["type"]] = text
