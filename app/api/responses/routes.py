"""POST /v1/responses, and what was stored of them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.context import Api, ApiDep
from app.api.docs import GENERATING, LOOKING, READING, answers
from app.api.generation import new_id
from app.api.prompt import chat_prompt
from app.api.responses.answer import Frame
from app.api.responses.items import new_item_id
from app.api.responses.making import Making
from app.api.responses.output import Output
from app.api.responses.request import Conversation, chat_request, conversation_of, fitted, own_names
from app.api.responses.store import Stored
from app.api.responses.tools import Toolset
from app.api.schemas.response_answers import DeletedResponse, InputItems, InputTokens, ResponseEvent, ResponseObject
from app.api.schemas.responses import InputItem, InputTokensRequest, ResponsesRequest
from app.api.shape import Shape
from app.api.understood import Understood, understood
from app.errors import InvalidParameter

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.post("/v1/responses", **answers(ResponseObject, GENERATING, event=ResponseEvent, end_mark=False))
@router.post("/responses", include_in_schema=False, response_model=None)
async def create_response(request: Request, body: ResponsesRequest, api: ApiDep) -> Response:
    """Answer to a conversation by messages and calls, whole or as a stream of server-sent events."""
    model = api.check_model(body.model)
    conversation = conversation_of(body, api.responses)
    asked, tools = await api.in_thread(lambda: asked_for(body, conversation, api))
    frame = Frame(
        id=new_id("resp").replace("-", "_"),
        model=model,
        body=body,
        sampling=asked.params.sampling,
        n_prompt=len(asked.prompt.tokens),
    )
    running = asked.submit(api, frame.id)
    making = Making(frame, asked, output_of(body, tools, asked, api), api.responses, stored_of(frame, conversation))
    shape = shape_of(frame, api)
    if body.stream:
        return making.stream(running, shape, api)

    async def answer() -> Response:
        return JSONResponse(await making.whole(running, shape))

    try:
        return await running.whole(request, answer)
    finally:
        making.abandon()


def asked_for(body: ResponsesRequest, conversation: Conversation, api: Api) -> tuple[Understood, Toolset]:
    """All about the request that may take long to find out."""
    with own_names():
        chat, tools = chat_request(body, conversation)
        asked, _ = fitted(chat, lambda chat: understood(chat, api), may_cut=body.truncation == "auto")
    return asked, tools


def output_of(body: ResponsesRequest, tools: Toolset, asked: Understood, api: Api) -> Output:
    reasoning = body.reasoning
    summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    n_top = asked.params.sampling.n_logprobs
    return Output(tools, api.service.tokenizer, n_top=n_top, summarised=summary not in (None, "none"))


def stored_of(frame: Frame, conversation: Conversation) -> Stored | None:
    """What is kept of a response from its beginning; None where the client wants nothing kept."""
    if frame.body.store is False:
        return None
    given = tuple(
        item if item.id else item.model_copy(update={"id": new_item_id("item")}) for item in conversation.given
    )
    return Stored(frame.id, frame.response("in_progress", []), given, conversation.parent)


def shape_of(frame: Frame, api: Api) -> Shape:
    """As the journal wants it."""
    tokenizer = api.service.tokenizer
    return Shape(
        id=frame.id,
        object="response",
        model=frame.model,
        fingerprint=api.fingerprint,
        tokenizer=tokenizer,
        n_prompt=frame.n_prompt,
    )


@router.post("/v1/responses/input_tokens", **answers(InputTokens, (*READING, 404)))
@router.post("/responses/input_tokens", include_in_schema=False, response_model=None)
async def count_input_tokens(body: InputTokensRequest, api: ApiDep) -> dict[str, Any]:
    """How many tokens the prompt of such a response would have."""
    api.check_model(body.model)
    conversation = conversation_of(body, api.responses)

    def count() -> int:
        with own_names():
            chat, _ = chat_request(body, conversation)
            return len(chat_prompt(chat, api, datetime.now()).tokens)

    return {"object": "response.input_tokens", "input_tokens": await api.in_thread(count)}


@router.get("/v1/responses/{response_id}", **answers(ResponseObject, (*LOOKING, 400, 404)))
@router.get("/responses/{response_id}", include_in_schema=False, response_model=None)
async def get_response(response_id: str, api: ApiDep, stream: Annotated[bool, Query()] = False) -> dict[str, Any]:
    """A stored response as it stands now."""
    stored = api.responses.get(response_id)
    if stream:
        raise InvalidParameter("the events of a stored response are not kept; leave stream out", param="stream")
    return stored.answer


@router.delete("/v1/responses/{response_id}", **answers(DeletedResponse, (*LOOKING, 404)))
@router.delete("/responses/{response_id}", include_in_schema=False, response_model=None)
async def delete_response(response_id: str, api: ApiDep) -> dict[str, Any]:
    """Forget a stored response; one that is still made is stopped."""
    api.responses.remove(response_id)
    if (stop := api.cancels.get(response_id)) is not None:
        stop()
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", **answers(ResponseObject, (*LOOKING, 404)))
@router.post("/responses/{response_id}/cancel", include_in_schema=False, response_model=None)
async def cancel_response(response_id: str, api: ApiDep) -> dict[str, Any]:
    """Stop a response that is made; one that is over stays as it is."""
    stored = api.responses.get(response_id)
    if (stop := api.cancels.get(response_id)) is not None:
        stop()
        return {**stored.answer, "status": "cancelled"}
    return stored.answer


@router.get("/v1/responses/{response_id}/input_items", **answers(InputItems, (*LOOKING, 400, 404)))
@router.get("/responses/{response_id}/input_items", include_in_schema=False, response_model=None)
async def list_input_items(
    response_id: str,
    api: ApiDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query()] = None,
) -> dict[str, Any]:
    """The steps that a stored response answered to, those of the responses before it among them."""
    stored = api.responses.get(response_id)
    earlier = [] if stored.parent is None else stored.parent.conversation()
    items = [told_item(item) for item in (*earlier, *stored.given)]
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise InvalidParameter(f"no item of this response has the id {after[:80]!r}", param="after")
        items = items[at + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


def told_item(item: InputItem) -> dict[str, Any]:
    """An item as lists show it: text in parts."""
    told = item.model_dump(exclude_none=True)
    told.setdefault("type", "message")
    if isinstance(told.get("content"), str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        told["content"] = [{"type": kind, "text": told["content"]}]
    return told
