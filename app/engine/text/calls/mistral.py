"""Mistral's calls: `[TOOL_CALLS]` and a JSON list, or a name and `[ARGS]` with an object, once per call."""

from __future__ import annotations

import re

from app.engine.text.calls.base import (
    NEXT_IN_LIST,
    OBJECT_HEAD,
    CallFormat,
    Taken,
    Tools,
    call_of,
    json_at,
    named_call,
    skip_spaces,
    wait,
)
from app.engine.text.calls.readers import Begun, JsonReader

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_HEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*([^\[\s]*)\s*)?(?:\[ARGS\])?\s*(?=\{)")


def take(text: str, tools: Tools, is_final: bool) -> Taken | None:
    at = skip_spaces(text, len(OPENING))
    if at < len(text) and text[at] in "[{" and not text.startswith(ARGUMENTS, at):
        found = json_at(text, at)
        if found is None:
            return wait(is_final)
        values = found[0] if isinstance(found[0], list) else [found[0]]
        return Taken(tuple(call_of(value, tools) for value in values), found[1])
    head = _HEAD.match(text, at)
    if head is None:
        return wait(is_final)
    found = json_at(text, head.end())
    if found is None:
        return wait(is_final)
    return Taken((named_call(head[1], found[0], tools),), found[1])


_LIST_HEAD = re.compile(OBJECT_HEAD.format(between=r"\[TOOL_CALLS\]\s*\[?\s*"))
_NEXT_HEAD = re.compile(OBJECT_HEAD.format(between=NEXT_IN_LIST))
_ID = re.compile(r"[A-Za-z0-9]{9}")


def begin(text: str, at: int, tools: Tools) -> Begun | None:
    listed = (_NEXT_HEAD if at else _LIST_HEAD).match(text, at)
    if listed is not None:
        return Begun(listed[1], listed.end(), JsonReader()) if listed[1] in tools else None
    head = None if at else _HEAD.match(text, len(OPENING))
    if head is None or head[1] not in tools:
        return None
    is_id = head[2] is not None and _ID.fullmatch(head[2])
    return Begun(head[1], head.end(), JsonReader(), head[2] if is_id else None)


FORMAT = CallFormat(
    name="mistral",
    signs=(OPENING,),
    openings=(OPENING,),
    take=take,
    markers=(OPENING, ARGUMENTS, CALL_ID),
    id_chars=9,
    begin=begin,
)
