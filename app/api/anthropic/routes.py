"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients call them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.anthropic.errors import TYPES, told
from app.api.anthropic.events import Event, Whole, Wording, pump
from app.api.anthropic.request import chat_request, in_own_words
from app.api.body import JsonRoute
from app.api.context import Api, ApiDep
from app.api.docs import GENERATING, READING, answers
from app.api.errors import error_body, kind_of
from app.api.generation import Running
from app.api.journal import note
from app.api.prompt import chat_text, text_tokens
from app.api.schemas.anthropic import CountTokensRequest, MessagesRequest
from app.api.schemas.anthropic_answers import AnthropicError, MessageAnswer, MessageEvent, TokenCount
from app.api.shape import Shape
from app.api.stream import Emit, EventStream, sse
from app.api.understood import Understood, understood
from app.errors import RequestError

router = APIRouter(route_class=JsonRoute, tags=["messages"])

PING = sse({"type": "ping"}, "ping")
#: The statuses of errors in this dialect.
ERRORS = tuple(TYPES.get(status, (status,))[0] for status in GENERATING)


@router.post("/v1/messages", **answers(MessageAnswer, ERRORS, event=MessageEvent, error=AnthropicError, end_mark=False))
async def messages(request: Request, body: MessagesRequest, api: ApiDep) -> Response:
    """Continue a conversation by one assistant message, in Anthropic's words."""
    model = api.check_model(body.model)
    asked = await api.in_thread(lambda: understood_here(body, api))
    shape = Shape(
        id=f"msg_{uuid.uuid4().hex}",
        object="message",
        model=model,
        fingerprint=api.fingerprint,
        tokenizer=api.service.tokenizer,
        n_prompt=len(asked.prompt.tokens),
    )
    hides_thoughts = body.thinking is not None and body.thinking.display == "omitted"
    wording = Wording(shape=shape, max_tokens=body.max_tokens, hides_thoughts=hides_thoughts)
    running = asked.submit(api, shape.id)
    if body.stream:
        return streamed(running, asked, wording, api)
    return await running.whole(request, lambda: whole(running, asked, wording))


def understood_here(body: MessagesRequest, api: Api) -> Understood:
    chat = chat_request(body)
    try:
        return understood(chat, api)
    except RequestError as error:
        raise in_own_words(error) from error


async def whole(running: Running, asked: Understood, wording: Wording) -> Response:
    """All of the answer in one object."""
    answer = Whole()
    choices = await running.each(lambda i, stream: pump(asked.new_choice(i), stream, wording, answer.tell))
    note(wording.shape, choices)
    return JSONResponse(answer.message)


def streamed(running: Running, asked: Understood, wording: Wording, api: Api) -> EventStream:
    """The answer in events, each under its name."""

    async def produce(emit: Emit) -> None:
        async def tell(events: Sequence[Event]) -> None:
            await emit(b"".join(sse(event, event["type"]) for event in events))

        note(wording.shape, await running.each(lambda i, stream: pump(asked.new_choice(i), stream, wording, tell)))

    return EventStream(
        produce,
        on_end=running.close,
        keepalive_s=api.options.keepalive_s,
        keep_alive=PING,
        tell_error=lambda error: sse(told(kind_of(error).status, error_body(error))[1], "error"),
    )


@router.post("/v1/messages/count_tokens", **answers(TokenCount, (*READING, 404), error=AnthropicError))
async def count_tokens(body: CountTokensRequest, api: ApiDep) -> Response:
    """The exact length of the prompt that these messages make, also where it is too long to be answered."""
    api.check_model(body.model)

    def n_tokens() -> int:
        chat = chat_request(body)
        try:
            return len(text_tokens(chat_text(chat, api.service, datetime.now(), guarded=True), api.service.tokenizer))
        except RequestError as error:
            raise in_own_words(error) from error

    return JSONResponse({"input_tokens": await api.in_thread(n_tokens)})
