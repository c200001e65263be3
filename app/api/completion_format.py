"""Text completion answers, whole and in chunks, with log probabilities in their older shape."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.choice import Choice
from app.api.logprobs import finite, piece_of, token_text
from app.api.shape import Chunks, Shape
from app.api.stream import json_string
from app.api.usage import timings, usage
from app.engine.request import TokenInfo


@dataclass(slots=True)
class LegacyLogprobs:
    """Counts characters as tokens go by, so that every token knows where in the text it begins."""

    shape: Shape
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def of(self, tokens: Sequence[TokenInfo], n_hidden: int = 0) -> dict[str, Any]:
        """`tokens, token_logprobs, top_logprobs, text_offset`; the first `n_hidden` tokens are not in the text."""
        offsets = []
        for i, token in enumerate(tokens):
            offsets.append(self.offset)
            if i >= n_hidden:
                self.offset += len(self._decoder.decode(token.piece))
        return {
            "tokens": [token_text(token.piece) for token in tokens],
            "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenInfo) -> dict[str, float] | None:
        """Alternatives by their text, likeliest first; the chosen token is there even if it is none of them."""
        if token.logprob is None:
            return None
        top = {
            token_text(piece_of(other, token, self.shape.tokenizer)): finite(other.logprob)
            for other in token.top[: self.shape.n_top]
        }
        top.setdefault(token_text(token.piece), finite(token.logprob))
        return top


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as it stands before the answer. `n_hidden` of its tokens are not in the text: a BOS of ours."""

    text: str
    n_hidden: int


class CompletionChunks(Chunks):
    """`text_completion` objects of one choice."""

    def __init__(self, shape: Shape, index: int, echo: Echo | None) -> None:
        super().__init__(shape, index)
        self._before, self._after = self.constant('"text":', "")
        self._echo = echo
        self._logprobs = LegacyLogprobs(shape, len(echo.text) if echo else 0)

    def text(self, name: str, text: str, tokens: Sequence[TokenInfo], choice: Choice) -> bytes:
        if self.plain:
            return f"{self._before}{json_string(text)}{self._after}".encode()
        parts = {**self.empty(None), "text": text, **token_parts(tokens, self.shape, self._logprobs)}
        return self.event(parts, **self.extra_timings(choice))

    def empty(self, finish_reason: str | None) -> dict[str, Any]:
        return {"index": self.index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def start(self) -> bytes:
        return b"" if self._echo is None else self.event({**self.empty(None), "text": self._echo.text})

    @property
    def needs_all(self) -> bool:
        """The prompt's log probabilities come first in the answer, but last from the engine."""
        return self._echo is not None and self.shape.n_top is not None

    def whole(self, choice: Choice) -> bytes:
        parts = choice_object(choice, self.shape, self._echo)
        return self.event({**parts, "finish_reason": None}) + self.end(choice)


def token_parts(
    tokens: Sequence[TokenInfo], shape: Shape, logprobs: LegacyLogprobs, n_hidden: int = 0
) -> dict[str, Any]:
    parts: dict[str, Any] = {"logprobs": None if shape.n_top is None else logprobs.of(tokens, n_hidden)}
    if shape.return_tokens:
        parts["tokens"] = [token.token for token in tokens]
    return parts


def choice_object(choice: Choice, shape: Shape, echo: Echo | None) -> dict[str, Any]:
    tokens = choice.tokens if echo is None else [*choice.ending.prompt_logprobs, *choice.tokens]
    return {
        "index": choice.index,
        "text": (echo.text if echo else "") + choice.text(),
        **token_parts(tokens, shape, LegacyLogprobs(shape), echo.n_hidden if echo else 0),
        "finish_reason": choice.finish_reason,
    }


def completion_answer(shape: Shape, choices: Sequence[Choice], echoes: Sequence[Echo | None]) -> dict[str, Any]:
    """The whole answer as one object. `echoes` has one entry per prompt; a prompt's choices follow each other."""
    n = len(choices) // len(echoes)
    return {
        **shape.head(),
        "choices": [choice_object(choice, shape, echoes[choice.index // n]) for choice in choices],
        "usage": usage(shape.n_prompt, choices, choices[::n]),
        "timings": timings(choices[0].ending.timings),
    }
