"""What the control plane sees of the engine: submit, stream, abort, and a few facts. The API is written against this.

`Engine` in `engine.py` is the real one; tests of the API use a fake that produces scripted events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from app.engine.connection import ConnectionStats
from app.engine.request import Event, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from app.engine.grammar import Grammars
    from app.engine.ranking import Ranking
    from app.engine.text.templates import ChatTemplate
    from app.engine.text.tokenizer import Tokenizer


class Phase(StrEnum):
    """Where the service stands in its life."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"  # a device is lost; requests are refused until it is back
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """The phase, and what stands behind it. `progress` is 0 to 1 while loading."""

    phase: Phase
    detail: str = ""
    progress: float = 0.0
    seconds_left: float | None = None
    lost_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the loaded model, as /v1/models, /props and /slots show them."""

    name: str
    alias: str
    path: str
    architecture: str
    created_unix: int
    n_params: int
    size_bytes: int
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    n_ctx: int  # the most tokens one sequence may hold
    n_slots: int
    file_type: str
    n_held: int | None = None  # the most requests that run and wait at once; None: unknown
    devices: tuple[str, ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInfo:
    """One slot as /slots shows it."""

    id: int
    busy: bool
    request_id: str | None
    n_prompt: int
    n_cached: int
    n_processed: int
    n_decoded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The pooled vector of one input, not normalised. `vector` has n_embd floats."""

    vector: tuple[float, ...]
    n_tokens: int


class GenerationStream(Protocol):
    """The events of one request, in order. Iterate once, on the event loop that submitted it."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[Event]:
        """Events up to and including Finished. Raises an error of the tree if the request failed."""
        ...

    def abort(self) -> None:
        """Stop within one ubatch and free the slot. May be called at any time, from the loop, more than once."""
        ...


class InferenceService(Protocol):
    """The engine as the API knows it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate: ...

    @property
    def grammars(self) -> Grammars:
        """Compiled constraints; one whose `check` has passed costs nothing at submit."""
        ...

    @property
    def ranking(self) -> Ranking | None:
        """How the model ranks documents; None where it cannot."""
        ...

    def status(self) -> ServiceStatus: ...

    def prepare(self, sampling: SamplingParams) -> None:
        """Do beforehand what takes long to submit with these parameters. May block: call it on any thread but a loop's.

        Raises NotReady while there is no model.
        """
        ...

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Admit a request. Must be called on a running event loop; never blocks it.

        Raises QueueFull, NotReady, DeviceLost or ContextLengthExceeded at once; what goes wrong later is raised by
        the stream.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Abort by id; False when no such request is running."""
        ...

    def slots(self) -> Sequence[SlotInfo]: ...

    def counters(self) -> Mapping[str, float]:
        """Running totals and gauges, named as the metrics will be."""
        ...

    def connections(self) -> Sequence[ConnectionStats]:
        """The connections to remote devices, each once; none where all devices are local."""
        ...

    async def embed(self, prompt: Sequence[int], pooling: str) -> Embedding:
        """Hidden state after the last norm, pooled: `mean` or `last`."""
        ...
