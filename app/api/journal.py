"""One line in the log for every answer, and for every one that failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from app.api.choice import Choice
from app.api.shape import Shape
from app.api.usage import timings

log = logging.getLogger(__name__)


def note(shape: Shape, choices: Sequence[Choice]) -> None:
    """Log what an answer took; of several choices the times of the first."""
    times = timings(choices[0].ending.timings)
    log.info(
        "answered",
        extra={
            "id": shape.id,
            "prompt": shape.n_prompt,
            "cached": choices[0].ending.cached_tokens,
            "out": sum(choice.ending.completion_tokens for choice in choices),
            "queued_ms": times["queued_ms"],
            "prompt_ms": times["prompt_ms"],
            "tokens_per_s": times["predicted_per_second"],
            "finish": ",".join(choice.finish_reason for choice in choices),
        },
    )


def note_failure(request_id: str, error: Exception) -> None:
    """Log that an answer ended with an error, be it as a status or as the last event of a stream."""
    log.warning("not answered: %s", error, extra={"id": request_id, "error": type(error).__name__})
