"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.chat_format import ChatChunks, chat_answer
from app.api.context import ApiDep
from app.api.docs import GENERATING, answers
from app.api.generation import Running, new_id
from app.api.journal import note
from app.api.pump import streamed
from app.api.schemas.answers import ChatCompletion, ChatCompletionChunk
from app.api.schemas.chat import ChatRequest
from app.api.shape import Shape, shape_of
from app.api.understood import Understood, understood

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", **answers(ChatCompletion, GENERATING, event=ChatCompletionChunk))
@router.post("/chat/completions", include_in_schema=False, response_model=None)
async def chat_completions(request: Request, body: ChatRequest, api: ApiDep) -> Response:
    """Continue a conversation by one assistant message, whole or as a stream of server-sent events."""
    api.check_model(body.model)
    asked = await api.in_thread(lambda: understood(body, api))
    shape = shape_of(
        body,
        api,
        id=new_id("chatcmpl"),
        object="chat.completion.chunk" if body.stream else "chat.completion",
        n_prompt=len(asked.prompt.tokens),
        n_top=asked.params.sampling.n_logprobs,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    running = asked.submit(api, shape.id)
    if body.stream:
        n = asked.params.n
        return streamed(running, shape, api, lambda i: ChatChunks(shape, i), new_choice=asked.new_choice, n=n)
    return await running.whole(request, lambda: whole_chat(running, shape, asked))


async def whole_chat(running: Running, shape: Shape, asked: Understood) -> Response:
    keeps = shape.tells_tokens
    choices = await running.each(lambda i, stream: asked.new_choice(i, keep_tokens=keeps).collect(stream))
    note(shape, choices)
    return JSONResponse(chat_answer(shape, choices))
