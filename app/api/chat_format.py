"""Chat completion answers, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.choice import CallPiece, Choice, ToldCall
from app.api.logprobs import chat_entries
from app.api.shape import Chunks, Shape
from app.api.stream import json_string
from app.api.usage import timings, usage
from app.engine.request import TokenInfo


def token_parts(tokens: Sequence[TokenInfo], shape: Shape) -> dict[str, Any]:
    """The parts of a choice that are told per token."""
    content = None if shape.n_top is None else chat_entries(tokens, shape.n_top, shape.tokenizer)
    parts: dict[str, Any] = {"logprobs": None if content is None else {"content": content, "refusal": None}}
    if shape.return_tokens:
        parts["tokens"] = [token.token for token in tokens]
    return parts


class ChatChunks(Chunks):
    """`chat.completion.chunk` objects of one choice."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__(shape, index)
        self._before, self._after = self.constant('"delta":{"', "}")

    def text(self, name: str, text: str, tokens: Sequence[TokenInfo], choice: Choice) -> bytes:
        if self.plain:
            return f'{self._before}{name}":{json_string(text)}{self._after}'.encode()
        parts = {**self.empty(None), "delta": {name: text}, **token_parts(tokens, self.shape)}
        return self.event(parts, **self.extra_timings(choice))

    def call(self, step: CallPiece, tokens: Sequence[TokenInfo], choice: Choice) -> bytes:
        if self.plain and step.name is None:
            entry = f'{{"index":{step.index},"function":{{"arguments":{json_string(step.arguments)}}}}}'
            return f'{self._before}tool_calls":[{entry}]{self._after}'.encode()
        delta = {"tool_calls": [call_delta(step)]}
        parts = {**self.empty(None), "delta": delta, **token_parts(tokens, self.shape)}
        return self.event(parts, **self.extra_timings(choice))

    def empty(self, finish_reason: str | None) -> dict[str, Any]:
        delta = {} if finish_reason else {"content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def start(self) -> bytes:
        return self.event({**self.empty(None), "delta": {"role": "assistant", "content": ""}})


def chat_answer(shape: Shape, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer as one object."""
    return {
        **shape.head(),
        "choices": [
            {
                "index": choice.index,
                "message": message_of(choice),
                **token_parts(choice.tokens, shape),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ],
        "usage": usage(shape.n_prompt, choices, choices[:1]),
        "timings": timings(choices[0].ending.timings),
    }


def call_delta(step: CallPiece) -> dict[str, Any]:
    """The id, type and name of a call come once, with its first step."""
    if step.name is None:
        return {"index": step.index, "function": {"arguments": step.arguments}}
    function = {"name": step.name, "arguments": step.arguments}
    return {"index": step.index, "id": step.id, "type": "function", "function": function}


def call_entry(call: ToldCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_of(choice: Choice) -> dict[str, Any]:
    content = choice.text()
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.calls:
        message.update(content=content or None, tool_calls=[call_entry(call) for call in choice.calls])
    if "reasoning_content" in choice.texts:
        message["reasoning_content"] = choice.text("reasoning_content")
    return message
