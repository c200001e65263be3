"""From the request for a response to the request for a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from app.api.responses.conversation import messages_of
from app.api.responses.store import ResponseStore, Stored
from app.api.responses.tools import Toolset, chosen, toolset
from app.api.schemas.chat import ChatRequest, JsonSchemaFormat, Message, ResponseFormat
from app.api.schemas.responses import InputFields, InputItem, InputPart, ResponsesRequest, TextFormat
from app.api.schemas.sampling import SamplingFields
from app.errors import ContextLengthExceeded, InvalidParameter, RequestError

T = TypeVar("T")

#: Fields that stand for things this server does not have.
UNSUPPORTED = ("background", "conversation", "prompt")
#: What the fields of a chat are called here.
FIELD_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "max_completion_tokens": "max_output_tokens",
}
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a response answers to: the steps that were given, and those of the responses it follows."""

    given: tuple[InputItem, ...]
    parent: Stored | None

    def items(self) -> list[InputItem]:
        return [*(() if self.parent is None else self.parent.conversation()), *self.given]


def conversation_of(body: InputFields, store: ResponseStore) -> Conversation:
    """Find what the request refers to. Raises InvalidParameter for what is not there any more."""
    for name in UNSUPPORTED:
        if getattr(body, name, None):
            raise InvalidParameter(f"{name} is not supported by this server; leave it out", param=name)
    parent = None if body.previous_response_id is None else store.previous(body.previous_response_id)
    given = body.input
    if given is None and parent is None:
        raise InvalidParameter("input is missing: text, or a list of the conversation's steps", param="input")
    if not isinstance(given, list):
        return Conversation((_said(given or ""),) if given or parent is None else (), parent)
    items = [
        _found(item, store, f"input[{i}]") if item.type == "item_reference" else item for i, item in enumerate(given)
    ]
    if not items and parent is None:
        items = [_said("")]  # clients probe with nothing at all
    return Conversation(tuple(items), parent)


def _said(text: str) -> InputItem:
    return InputItem(type="message", role="user", content=[InputPart(type="input_text", text=text)])


def _found(item: InputItem, store: ResponseStore, where: str) -> InputItem:
    found = None if item.id is None else store.item(item.id)
    if found is None:
        raise InvalidParameter(
            f"{where} refers to {str(item.id)[:80]!r}, which is not stored here; send the item itself",
            param=where,
            code="item_not_found",
        )
    return found


def chat_request(body: InputFields, conversation: Conversation) -> tuple[ChatRequest, Toolset]:
    """The chat that this asks for. Raises InvalidParameter."""
    found = toolset(body.tools or ())
    choice, tools = chosen(body.tool_choice, found)
    items = conversation.items()
    messages = messages_of(items, body.instructions, len(items) - len(conversation.given))
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages or [Message.model_construct(role="user", content="")],
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": _response_format(body.text.format if body.text else None),
    }
    if isinstance(body, ResponsesRequest):
        fields |= _generation(body)
    return ChatRequest.model_construct(**fields), found


def _generation(body: ResponsesRequest) -> dict[str, Any]:
    """Fields that only matter when something is generated."""
    has_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    return {
        **{name: getattr(body, name) for name in SamplingFields.model_fields},
        "stream": body.stream,
        "stop": body.stop,
        "cache_prompt": body.cache_prompt,
        "max_completion_tokens": body.max_output_tokens,
        "chat_template_kwargs": body.chat_template_kwargs,
        "logprobs": has_logprobs or None,
        "top_logprobs": (body.top_logprobs or 0) if has_logprobs else None,
    }


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    schema = JsonSchemaFormat.model_construct(schema_=given.schema_)
    return ResponseFormat.model_construct(type=given.type, json_schema=schema if given.type == "json_schema" else None)


@contextmanager
def own_names() -> Iterator[None]:
    """Errors of the chat within name the fields of the request for a response."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        head, dot, rest = param.partition(".")
        name = FIELD_NAMES.get(head)
        if name is not None:
            error.param = FIELD_NAMES.get(param, name + dot + rest)
            error.args = (str(error).replace(head, name, 1),)
        raise


def fitted(chat: ChatRequest, work: Callable[[ChatRequest], T], *, may_cut: bool) -> tuple[T, ChatRequest]:
    """Do `work`; where the conversation is too long for it and may be cut, without the oldest turns, as few as can be.

    The instructions in front stay.
    """
    try:
        return work(chat), chat
    except ContextLengthExceeded:
        if not may_cut:
            raise
        cuts = list(_shorter(chat.messages))
    low, high, best = 0, len(cuts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        shorter = chat.model_copy(update={"messages": cuts[middle]})
        try:
            best = work(shorter), shorter
            high = middle - 1
        except ContextLengthExceeded:
            low = middle + 1
    return (work(chat), chat) if best is None else best


def _shorter(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation from each of its later turns of the user on."""
    first = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
    for i in range(first + 1, len(messages)):
        if messages[i].role == "user":
            yield [*messages[:first], *messages[i:]]
