"""From the engine's events to a stream of chunks, for every dialect whose chunks are `Chunks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.api.choice import Choice
from app.api.context import Api
from app.api.generation import Running
from app.api.journal import note
from app.api.shape import Chunks, Shape
from app.api.stream import DONE, Emit, EventStream, sse
from app.api.usage import usage
from app.engine.request import Delta, Finished, Progress, Started
from app.engine.service import GenerationStream


def streamed(
    running: Running,
    shape: Shape,
    api: Api,
    chunks_of: Callable[[int], Chunks],
    *,
    n: int,
    new_choice: Callable[[int], Choice] = Choice,
    done: bytes = DONE,
) -> EventStream:
    """All choices in one stream, interleaved as they come; then the usage, if asked for, and the end mark.

    `n` is the number of choices per prompt.
    """

    async def produce(emit: Emit) -> None:
        async def one(index: int, stream: GenerationStream) -> Choice:
            return await pump(new_choice(index), stream, chunks_of(index), emit)

        choices = await running.each(one)
        note(shape, choices)
        if ending := usage_event(shape, choices, n) + done:
            await emit(ending)

    return EventStream(produce, on_end=running.close, keepalive_s=api.options.keepalive_s)


async def pump(choice: Choice, stream: GenerationStream, chunks: Chunks, emit: Emit) -> Choice:
    """Write one choice's events as chunks."""
    tells_tokens = chunks.shape.tells_tokens
    if chunks.needs_all:
        choice.keep_tokens = tells_tokens
        await choice.collect(stream)
        await emit(chunks.whole(choice))
        return choice
    async for event in stream:
        match event:
            case Delta():
                pieces = choice.push(event)
                if not pieces and tells_tokens:
                    pieces = (("content", ""),)
                for piece in pieces[:-1]:
                    await emit(chunks.piece(piece, (), choice))
                for piece in pieces[-1:]:
                    await emit(chunks.piece(piece, event.tokens, choice))
            case Started():
                choice.start(event)
                if opening := chunks.start():
                    await emit(opening)
            case Progress():
                await emit(chunks.progress(event))
            case Finished():
                held_back = b"".join(chunks.piece(piece, (), choice) for piece in choice.end(event))
                await emit(held_back + chunks.end(choice))
    return choice


def usage_event(shape: Shape, choices: Sequence[Choice], n: int) -> bytes:
    """The only event without choices, so it comes only when asked for."""
    if not shape.include_usage:
        return b""
    return sse({**shape.head(), "choices": [], "usage": usage(shape.n_prompt, choices, choices[::n])})
