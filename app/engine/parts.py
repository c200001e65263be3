"""What bootstrap builds and the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.engine.executor import Executor
from app.engine.grammar import Grammars
from app.engine.ranking import Ranking
from app.engine.service import ModelInfo
from app.engine.serving.types import SchedulerConfig
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.engine.trace import Trace
from app.errors import DeviceLost

#: Called on a thread of its own when devices are lost; returns an executor over stages that stand again. Tells the
#: function it is given why an attempt has failed.
Recovery = Callable[[Executor, DeviceLost, Callable[[str], None]], Executor]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What bootstrap builds and the engine runs."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    config: SchedulerConfig
    executor: Executor
    grammars: Grammars | None = None
    ranking: Ranking | None = None
    recovery: Recovery | None = None
    max_in_flight: int = 2
    trace: Trace | None = None
