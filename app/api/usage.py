"""Counts and times as answers report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.choice import Choice
from app.engine.request import Progress, Timings


def usage(n_prompt: int, choices: Sequence[Choice], first_choices: Sequence[Choice]) -> dict[str, Any]:
    """The `usage` object. Each prompt counts once, however many choices it has.

    What is cached is told of each prompt's first choice: the others find the prompt computed by it.
    """
    n_completion = sum(choice.ending.completion_tokens for choice in choices)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.ending.cached_tokens for choice in first_choices)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.n_reasoning for choice in choices)},
    }


def timings(times: Timings) -> dict[str, Any]:
    """llama-server's `timings`, and what it adds up from them."""
    return {
        "cache_n": times.cache_n,
        "prompt_n": times.prompt_n,
        "prompt_ms": round(times.prompt_ms, 3),
        **rates("prompt", times.prompt_n, times.prompt_ms),
        "predicted_n": times.predicted_n,
        "predicted_ms": round(times.predicted_ms, 3),
        **rates("predicted", times.predicted_n, times.predicted_ms),
        "queued_ms": round(times.queued_ms, 3),
    }


def rates(name: str, n_tokens: int, elapsed_ms: float) -> dict[str, float]:
    return {
        f"{name}_per_token_ms": round(elapsed_ms / n_tokens, 3) if n_tokens else 0.0,
        f"{name}_per_second": round(1e3 * n_tokens / elapsed_ms, 3) if elapsed_ms > 0 else 0.0,
    }


def prompt_progress(progress: Progress) -> dict[str, Any]:
    """llama-server's `prompt_progress`: how far the prompt is computed, what was cached included."""
    return {
        "total": progress.prompt_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.processed_tokens,
        "time_ms": round(progress.elapsed_ms),
    }
