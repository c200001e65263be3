"""Answers of /infill in llama-server's own shape, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.choice import Choice
from app.api.logprobs import chat_entries
from app.api.shape import Chunks, Shape
from app.api.stream import json_string, sse
from app.api.usage import prompt_progress, timings
from app.engine.request import FinishReason, Progress, TokenInfo


class NativeChunks(Chunks):
    """Objects with `content` and `stop`; the last one tells how it ended."""

    def text(self, name: str, text: str, tokens: Sequence[TokenInfo], choice: Choice) -> bytes:
        if self.plain:
            return f'data: {{"index":{self.index},"content":{json_string(text)},"stop":false}}\n\n'.encode()
        parts = {"index": self.index, "content": text, "stop": False, **token_parts(tokens, self.shape)}
        return sse({**parts, **self.extra_timings(choice)})

    def empty(self, finish_reason: str | None) -> dict[str, Any]:
        return {"index": self.index, "content": "", "stop": finish_reason is not None}

    def progress(self, progress: Progress) -> bytes:
        return sse({**self.empty(None), "prompt_progress": prompt_progress(progress)})

    def end(self, choice: Choice) -> bytes:
        return sse({**native_answer(self.shape, choice), "content": "", "tokens": []})


def token_parts(tokens: Sequence[TokenInfo], shape: Shape) -> dict[str, Any]:
    parts: dict[str, Any] = {"tokens": [token.token for token in tokens] if shape.return_tokens else []}
    if shape.n_top is not None:
        parts["completion_probabilities"] = chat_entries(tokens, shape.n_top, shape.tokenizer)
    return parts


def native_answer(shape: Shape, choice: Choice) -> dict[str, Any]:
    """One finished choice."""
    ending = choice.ending
    return {
        "index": choice.index,
        "content": choice.text(),
        **token_parts(choice.tokens, shape),
        "stop": True,
        "model": shape.model,
        "stop_type": stop_type(choice),
        "stopping_word": ending.stop_string or "",
        "truncated": False,
        "tokens_predicted": ending.completion_tokens,
        "tokens_evaluated": ending.prompt_tokens,
        "tokens_cached": ending.cached_tokens,
        "timings": timings(ending.timings),
    }


def stop_type(choice: Choice) -> str:
    if choice.ending.reason is FinishReason.LENGTH:
        return "limit"
    return "word" if choice.ending.stop_string is not None else "eos"
