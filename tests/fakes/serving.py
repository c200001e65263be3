"""A real engine over a tiny model, for tests of the step loop and of what stands above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.engine.device import Device
from app.engine.embedding import TokenEmbedding
from app.engine.engine import Engine
from app.engine.executor import Executor, Scratch
from app.engine.gguf.reader import GGUFFile
from app.engine.gguf.writer import Typed
from app.engine.loader import load_stages, plan_stages
from app.engine.models import registry
from app.engine.parts import EngineParts, Recovery
from app.engine.ranking import Ranking
from app.engine.request import Delta, Event, Finished, GenerateRequest, SamplingParams, Started
from app.engine.service import ModelInfo
from app.engine.sizing import SizeWishes, choose_sizes
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.engine.trace import Trace
from tests.fakes.gguf import tokenizer_metadata

GREEDY = SamplingParams(temperature=0.0)


def open_engine(
    path: Path,
    devices: Sequence[Device],
    *,
    ctx_size: int = 512,
    n_slots: int = 2,
    n_ubatch: int = 64,
    max_queue: int = 4,
    cache_type: str = "f16",
    recovery: Recovery | None = None,
    max_in_flight: int = 2,
    tensor_split: Sequence[float] | None = None,
    snapshot_budget_bytes: int = 64 << 20,
    trace: Trace | None = None,
    executor: type[Executor] = Executor,
) -> Engine:
    """An engine that serves `path` over `devices`; close it, then the devices."""
    gguf = GGUFFile.open(path)
    model = registry.load(gguf)
    wishes = SizeWishes(
        ctx_size=ctx_size,
        n_slots=n_slots,
        n_ubatch=n_ubatch,
        max_queue=max_queue,
        cache_prompts=True,
        key_type=cache_type,
        value_type=cache_type,
        tensor_split=tensor_split,
        snapshot_budget_bytes=snapshot_budget_bytes,
    )
    sizes = choose_sizes(model, devices, wishes)
    model = registry.load(gguf, n_ctx=sizes.scheduler.n_ctx)
    stages = load_stages(gguf, model, plan_stages(model, devices, sizes.limits, tensor_split), sizes.limits)
    metadata = gguf.metadata
    if metadata["tokenizer.ggml.model"] == "no_vocab":  # a benchmark's
        told = tokenizer_metadata(model.n_vocab).items()
        metadata = {**metadata, **{key: value.value if isinstance(value, Typed) else value for key, value in told}}
    tokenizer = Tokenizer.from_metadata(metadata)
    config = sizes.scheduler
    scratch = Scratch(
        cell=config.scratch_cell, state_row=config.scratch_slot, first_snapshot_row=config.scratch_slot + 1
    )
    info = ModelInfo(
        name=model.name,
        alias="tiny",
        path=str(path),
        architecture=model.architecture,
        created_unix=0,
        n_params=0,
        size_bytes=gguf.size_bytes,
        n_vocab=model.n_vocab,
        n_embd=model.n_embd,
        n_ctx_train=model.n_ctx_train,
        n_ctx=config.n_ctx,
        n_slots=config.n_slots,
        file_type="0",
    )
    return Engine(
        EngineParts(
            info=info,
            tokenizer=tokenizer,
            template=ChatTemplate.from_metadata(metadata, tokenizer),
            config=config,
            executor=executor(model, stages, TokenEmbedding.of(gguf, model), sizes.limits, scratch),
            ranking=Ranking.of(gguf, tokenizer),
            recovery=recovery,
            max_in_flight=max_in_flight,
            trace=trace,
        )
    )


def request(id_: str, prompt: Sequence[int], max_tokens: int | None = 8, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id=id_, prompt=tuple(prompt), max_tokens=max_tokens, **{"sampling": GREEDY, **fields})


async def collect(engine: Engine, wanted: GenerateRequest) -> list[Event]:
    """All events of a request, submitted now."""
    return [event async for event in engine.submit(wanted)]


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [info.token for event in events if isinstance(event, Delta) for info in event.tokens]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def started(events: Sequence[Event]) -> Started:
    return next(event for event in events if isinstance(event, Started))


def finished(events: Sequence[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last
