"""Bytes of chat completion answers. What is the same in every chunk of a stream is serialised once."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.api.choice import Choice
from app.api.logprobs import chat_entries
from app.api.stream import json_string, sse
from app.api.usage import prompt_progress, timings, usage
from app.engine.request import Finished, Progress, TokenInfo

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What an answer is called and which optional parts it has. `n_top` None: no logprobs."""

    id: str
    model: str
    fingerprint: str
    n_prompt: int
    n_top: int | None = None
    return_tokens: bool = False
    include_usage: bool = False
    created: int = 0

    def head(self, kind: str) -> dict[str, Any]:
        created = self.created or int(time.time())
        return {
            "id": self.id,
            "object": kind,
            "created": created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    @property
    def wants_tokens(self) -> bool:
        return self.return_tokens or self.n_top is not None


def token_parts(tokens: Sequence[TokenInfo], shape: ChatShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """The parts of a choice that are told per token."""
    content = None if shape.n_top is None else chat_entries(tokens, shape.n_top, tokenizer)
    parts: dict[str, Any] = {"logprobs": None if content is None else {"content": content, "refusal": None}}
    if shape.return_tokens:
        parts["tokens"] = [token.token for token in tokens]
    return parts


class ChatChunks:
    """Chunks of one choice of a stream."""

    def __init__(self, shape: ChatShape, head: Mapping[str, Any], index: int, tokenizer: Tokenizer) -> None:
        self._shape = shape
        self._head = head
        self._index = index
        self._tokenizer = tokenizer
        usage_null = ',"usage":null' if shape.include_usage else ""
        before = json.dumps(head, ensure_ascii=False, separators=(",", ":"))[:-1]
        self._before = f'data: {before},"choices":[{{"index":{index},"delta":{{"'
        self._after = f'}},"logprobs":null,"finish_reason":null}}]{usage_null}}}\n\n'

    def text(self, name: str, text: str, tokens: Sequence[TokenInfo]) -> bytes:
        """New text of one field, with what is asked to be told of its tokens."""
        if self._shape.wants_tokens:
            return self.any({name: text}, **token_parts(tokens, self._shape, self._tokenizer))
        return f'{self._before}{name}":{json_string(text)}{self._after}'.encode()

    def any(
        self,
        delta: Mapping[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Any = None,
        tokens: Any = None,
        **extra: Any,
    ) -> bytes:
        """A chunk of any kind."""
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if tokens is not None:
            choice["tokens"] = tokens
        usage_null = {"usage": None} if self._shape.include_usage else {}
        return sse({**self._head, "choices": [choice], **usage_null, **extra})

    @property
    def tells_tokens(self) -> bool:
        return self._shape.wants_tokens

    def role(self) -> bytes:
        return self.any({"role": "assistant", "content": ""})

    def progress(self, progress: Progress) -> bytes:
        return self.any({"content": ""}, prompt_progress=prompt_progress(progress))

    def end(self, choice: Choice) -> bytes:
        return self.any({}, finish_reason=choice.finish_reason, timings=timings(choice.ending.timings))


def usage_chunk(shape: ChatShape, head: Mapping[str, Any], choices: Sequence[Choice]) -> bytes:
    """The one chunk without choices; only for those who asked."""
    return sse({**head, "choices": [], "usage": usage_of(shape, choices)})


def usage_of(shape: ChatShape, choices: Sequence[Choice]) -> dict[str, Any]:
    endings: list[Finished] = [choice.ending for choice in choices]
    return usage(shape.n_prompt, endings, sum(choice.n_reasoning for choice in choices))


def chat_answer(shape: ChatShape, choices: Sequence[Choice], tokenizer: Tokenizer) -> dict[str, Any]:
    """The whole answer as one object."""
    return {
        **shape.head("chat.completion"),
        "choices": [
            {
                "index": choice.index,
                "message": message_of(choice),
                **token_parts(choice.tokens, shape, tokenizer),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ],
        "usage": usage_of(shape, choices),
        "timings": timings(choices[0].ending.timings),
    }


def message_of(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text("content"), "refusal": None}
    if "reasoning_content" in choice.texts:
        message["reasoning_content"] = choice.text("reasoning_content")
    return message
