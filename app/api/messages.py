"""From a request's messages to the plain ones that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.schemas.chat import ContentPart, Message
from app.errors import InvalidParameter

Turn = dict[str, Any]

#: Kinds of content parts we can read, and the field that has their text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Messages without absent fields; ids of calls that clients left out are made up, since templates print them
    and some insist on nine letters and digits."""
    return [turn_of(message, f"messages[{i}]") for i, message in enumerate(messages)]


def turn_of(message: Message, where: str) -> Turn:
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            check_part(part, f"{where}.content[{i}]")
    turn = message.model_dump(exclude_none=True)
    for i, call in enumerate(turn.get("tool_calls", ())):
        call["type"] = "function"
        call.setdefault("id", f"call{i:05}")
    return turn


def check_part(part: ContentPart, where: str) -> None:
    """Raise for a part that is not text; nothing of a message is left out silently."""
    field = TEXT_PARTS.get(part.type)
    if field is None:
        raise InvalidParameter(
            f"content of type {part.type!r} is not supported by this model; send text", param=where, code="unsupported"
        )
    if getattr(part, field) is None:
        raise InvalidParameter(f"a part of type {part.type!r} needs its {field}", param=where)
