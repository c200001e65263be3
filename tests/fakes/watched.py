"""An executor that shows what it was given, and ways to have steps always go ahead of their tokens, or never."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from app.engine.engine import Engine
from app.engine.executor import Executor, Running
from app.engine.serving.types import Ubatch


class Watched(Executor):
    """`before_submit` is called on the engine's thread with every ubatch that is about to be submitted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.submitted: list[Ubatch] = []
        self.before_submit: Callable[[Ubatch], None] = lambda ubatch: None

    def submit(self, ubatch: Ubatch, *args: Any, **options: Any) -> Running:
        self.before_submit(ubatch)
        self.submitted.append(ubatch)
        running = super().submit(ubatch, *args, **options)
        assert ubatch.follows is None or running.lacks_tokens
        return running

    @property
    def n_ahead(self) -> int:
        return sum(ubatch.follows is not None for ubatch in self.submitted)


def watched(engine: Engine) -> Watched:
    executor = engine._standing.executor
    assert isinstance(executor, Watched)
    return executor


def go_ahead(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """Whatever steps take, all or none of them are submitted before their tokens are drawn."""
    monkeypatch.setattr("app.engine.overlap.AHEAD_BELOW_S", math.inf if always else 0.0)
