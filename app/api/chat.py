"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.chat_format import ChatChunks, chat_answer
from app.api.choice import Choice
from app.api.constraints import check, in_messages, thought_of
from app.api.context import Api, ApiDep
from app.api.docs import GENERATING, answers
from app.api.generation import Running, choice_ids, new_id
from app.api.journal import note
from app.api.params import Wanted, chat_params
from app.api.prompt import ChatPrompt, chat_prompt
from app.api.pump import streamed
from app.api.schemas.answers import ChatCompletion, ChatCompletionChunk
from app.api.schemas.chat import ChatRequest
from app.api.shape import Shape, shape_of
from app.api.tools import ToolUse, tool_use
from app.engine.text.reasoning import reasoning_parser

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", **answers(ChatCompletion, GENERATING, event=ChatCompletionChunk))
@router.post("/chat/completions", include_in_schema=False, response_model=None)
async def chat_completions(request: Request, body: ChatRequest, api: ApiDep) -> Response:
    """Continue a conversation by one assistant message, whole or as a stream of server-sent events."""
    api.check_model(body.model)
    params, prompt, use = await api.in_thread(lambda: understood(body, api))
    shape = shape_of(
        body,
        api,
        id=new_id("chatcmpl"),
        object="chat.completion.chunk" if body.stream else "chat.completion",
        n_prompt=len(prompt.tokens),
        n_top=params.sampling.n_logprobs,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    keeps_thoughts = (body.reasoning_format or api.options.reasoning_format) == "none"
    has_headers = api.answers_in_messages and (use is not None or params.constraint is not None)
    family = None if keeps_thoughts and not has_headers else api.thinking

    def new_choice(index: int) -> Choice:
        parser = None
        if family is not None:
            parser = reasoning_parser(family, prompt.text, has_tools=use is not None, inside=prompt.in_thought)
        calls = None if use is None else use.parser()
        return Choice(index, shape.tells_tokens and not body.stream, parser, calls)

    requests = params.requests(
        prompt.tokens,
        choice_ids(shape.id, params.n),
        message_starts=prompt.turn_starts,
        thought=None if params.constraint is None else thought_of(api.thinking, prompt),
    )
    running = Running.submit(api, shape.id, requests)
    if body.stream:
        return streamed(running, shape, api, lambda i: ChatChunks(shape, i), new_choice=new_choice, n=params.n)
    return await running.whole(request, lambda: whole_chat(running, shape, new_choice))


def understood(body: ChatRequest, api: Api) -> tuple[Wanted, ChatPrompt, ToolUse | None]:
    """All about the request that may take long to find out."""
    params = chat_params(body, api)
    prompt = chat_prompt(body, api, datetime.now())
    params, use = held_to_form(params, body, prompt, api)
    return params, prompt, use


def held_to_form(params: Wanted, body: ChatRequest, prompt: ChatPrompt, api: Api) -> tuple[Wanted, ToolUse | None]:
    """Compile the form the answer must have. Raises InvalidParameter for what is wrong with it or with the tools."""
    constraint = params.constraint
    use = tool_use(body, api, constraint)
    if use is not None:
        constraint = use.constraint
    elif constraint is not None and api.answers_in_messages:
        constraint = in_messages(constraint, prompt, api)
    check(constraint, api)
    return replace(params, constraint=constraint), use


async def whole_chat(running: Running, shape: Shape, new_choice: Callable[[int], Choice]) -> Response:
    choices = await running.each(lambda i, stream: new_choice(i).collect(stream))
    note(shape, choices)
    return JSONResponse(chat_answer(shape, choices))
