"""POST /v1/chat/completions."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.chat_format import ChatChunks, ChatShape, chat_answer, usage_chunk
from app.api.choice import Choice, events
from app.api.context import Api, ApiDep
from app.api.generation import Running, choice_ids, new_id
from app.api.params import chat_params, check_fits
from app.api.prompt import chat_text, prompt_tokens
from app.api.schemas.chat import ChatRequest
from app.api.stream import DONE, Emit, EventStream
from app.engine.request import Delta, Finished, Progress, Started
from app.engine.service import GenerationStream

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(request: Request, body: ChatRequest, api: ApiDep) -> Response:
    """Continue a conversation by one assistant message, whole or as a stream of server-sent events."""
    model = api.check_model(body.model)
    params = chat_params(body, api)
    service = api.service
    prompt = await api.in_thread(lambda: prompt_tokens(chat_text(body, service, datetime.now()), service.tokenizer))
    check_fits(len(prompt), api, param="messages")
    shape = ChatShape(
        id=new_id("chatcmpl"),
        model=model,
        fingerprint=api.fingerprint,
        n_prompt=len(prompt),
        n_top=params.sampling.n_logprobs,
        return_tokens=bool(body.return_tokens),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    running = Running.submit(service, params.requests(prompt, choice_ids(shape.id, params.n)))
    if body.stream:
        return chat_stream(running, shape, api)
    return await running.whole(request, lambda: whole_chat(running, shape, api))


async def whole_chat(running: Running, shape: ChatShape, api: Api) -> Response:
    choices = await running.each(lambda i, stream: Choice(i, shape.wants_tokens).collect(stream))
    return JSONResponse(chat_answer(shape, choices, api.service.tokenizer))


def chat_stream(running: Running, shape: ChatShape, api: Api) -> EventStream:
    """One stream for all choices; each has its own role, text and end."""
    head = shape.head("chat.completion.chunk")

    async def produce(emit: Emit) -> None:
        async def pump(index: int, stream: GenerationStream) -> Choice:
            chunks = ChatChunks(shape, head, index, api.service.tokenizer)
            return await pump_chat(Choice(index), stream, chunks, emit)

        choices = await running.each(pump)
        last = usage_chunk(shape, head, choices) if shape.include_usage else b""
        await emit(last + DONE)

    return EventStream(produce, on_end=running.abort, keepalive_s=api.options.keepalive_s)


async def pump_chat(choice: Choice, stream: GenerationStream, chunks: ChatChunks, emit: Emit) -> Choice:
    """Write one choice's events as chunks."""
    async for event in events(stream):
        match event:
            case Delta():
                pieces = choice.push(event) or ((("content", ""),) if chunks.tells_tokens else ())
                for name, text in pieces[:-1]:
                    await emit(chunks.text(name, text, ()))
                for name, text in pieces[-1:]:
                    await emit(chunks.text(name, text, event.tokens))
            case Started():
                await emit(chunks.role())
            case Progress():
                await emit(chunks.progress(event))
            case Finished():
                held_back = b"".join(chunks.text(name, text, ()) for name, text in choice.end(event))
                await emit(held_back + chunks.end(choice))
    return choice
