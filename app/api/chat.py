"""POST /v1/chat/completions."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.chat_format import ChatChunks, chat_answer
from app.api.choice import Choice
from app.api.context import ApiDep
from app.api.docs import GENERATING, answers
from app.api.generation import Running, choice_ids, new_id
from app.api.params import chat_params, check_fits
from app.api.prompt import chat_text, prompt_tokens
from app.api.pump import streamed
from app.api.schemas.answers import ChatCompletion, ChatCompletionChunk
from app.api.schemas.chat import ChatRequest
from app.api.shape import Shape

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", **answers(ChatCompletion, GENERATING, event=ChatCompletionChunk))
@router.post("/chat/completions", include_in_schema=False, response_model=None)
async def chat_completions(request: Request, body: ChatRequest, api: ApiDep) -> Response:
    """Continue a conversation by one assistant message, whole or as a stream of server-sent events."""
    model = api.check_model(body.model)
    params = chat_params(body, api)
    service = api.service
    prompt = await api.in_thread(lambda: prompt_tokens(chat_text(body, service, datetime.now()), service.tokenizer))
    check_fits(len(prompt), api, param="messages")
    shape = Shape(
        id=new_id("chatcmpl"),
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=model,
        fingerprint=api.fingerprint,
        tokenizer=service.tokenizer,
        n_prompt=len(prompt),
        n_top=params.sampling.n_logprobs,
        return_tokens=bool(body.return_tokens),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        timings_per_token=bool(body.timings_per_token),
    )
    running = Running.submit(api, shape.id, params.requests(prompt, choice_ids(shape.id, params.n)))
    if body.stream:
        return streamed(running, shape, api, chunks_of=lambda index: ChatChunks(shape, index), n=params.n)
    return await running.whole(request, lambda: whole_chat(running, shape))


async def whole_chat(running: Running, shape: Shape) -> Response:
    choices = await running.each(lambda i, stream: Choice(i, shape.tells_tokens).collect(stream))
    return JSONResponse(chat_answer(shape, choices))
