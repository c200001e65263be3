"""A request for the pooled hidden states of a prompt, while the engine works on it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.request import Embedded, Event, GenerateRequest, Started
from app.engine.serving.types import Ended, Report
from app.engine.stream import EventStream
from app.errors import ContextLengthExceeded, InvalidParameter, NotReady


def pooled_request(prompt: Sequence[int], pooling: str, n_ctx: int) -> GenerateRequest:
    """A request for hidden states instead of tokens. Raises InvalidParameter or ContextLengthExceeded."""
    if pooling not in ("mean", "last"):
        raise InvalidParameter(f"pooling {pooling!r} is not offered; use mean or last", param="pooling")
    if len(prompt) >= n_ctx:
        raise ContextLengthExceeded(len(prompt), n_ctx, param="input")
    return GenerateRequest(
        id=f"embed-{uuid.uuid4().hex}",
        prompt=tuple(prompt),
        max_tokens=1,
        cache_prompt=False,
        prompt_logprobs=pooling == "mean",
        pooling="mean" if pooling == "mean" else "last",
    )


class PoolingRequest:
    """Adds up the hidden rows of one prompt; owned by the engine's thread once submitted."""

    def __init__(self, request: GenerateRequest, stream: EventStream, n_embd: int, submitted_s: float) -> None:
        self.request = request
        self.stream = stream
        self.submitted_s = submitted_s
        self.deadline_s = None if request.deadline_s is None else submitted_s + request.deadline_s
        self._total: NDArray[np.float64] = np.zeros(n_embd)
        self._n_rows = 0
        self._is_whole = False

    def start(self, report: Report, now_s: float) -> Started:
        """The request has a slot."""
        del now_s
        return Started(prompt_tokens=report.prompt_tokens, cached_tokens=report.cached_tokens)

    def add(self, row: NDArray[np.float32], *, is_last: bool) -> None:
        """Take the hidden state of one more token, in prompt order."""
        self._total += row
        self._n_rows += 1
        self._is_whole = is_last

    def finish(self, ended: Ended, now_s: float) -> list[Event | BaseException]:
        """The vector, or why there is none."""
        del now_s
        if not self._is_whole:
            return [NotReady("the request was aborted before its prompt was read")]
        vector = tuple((self._total / self._n_rows).astype(np.float32).tolist())
        return [Embedded(vector=vector, prompt_tokens=ended.report.prompt_tokens)]
