"""Calls that are the whole answer, as JSON: Llama 3's `{"name", "parameters"}`, perhaps behind a tag of its own, and
what models without a format are asked to write, `{"tool_calls": [...]}`. A fence around it is forgiven."""

from __future__ import annotations

import re
from typing import Any

from app.engine.text.calls.base import (
    NEXT_IN_LIST,
    OBJECT_HEAD,
    Call,
    CallFormat,
    NoCall,
    Taken,
    Tools,
    behind,
    call_of,
    json_at,
    skip_spaces,
    wait,
)
from app.engine.text.calls.readers import Begun, JsonReader

PYTHON_TAG, FENCE, FENCE_END = "<|python_tag|>", "```json", "```"


def take(text: str, tools: Tools, is_final: bool) -> Taken | None:
    begins = next((tag for tag in (PYTHON_TAG, FENCE) if text.startswith(tag)), "")
    at = skip_spaces(text, len(begins))
    if at < len(text) and text[at] not in "{[":
        raise NoCall
    calls: tuple[Call, ...] = ()
    while True:
        found = json_at(text, at)
        if found is None:
            return wait(is_final)
        calls += calls_of(found[0], tools)
        end = found[1]
        if begins == FENCE:
            closed = behind(text, end, FENCE_END, is_final=is_final)
            return None if closed is None else Taken(calls, closed)
        after = skip_spaces(text, end)
        if after == len(text) and not is_final:
            return None  # another call may follow
        if not text.startswith(";", after):
            return Taken(calls, end)
        at = skip_spaces(text, after + 1)
        if at == len(text) and not is_final:
            return None
        if not text.startswith("{", at):
            return Taken(calls, after + 1)


_AROUND = r'(?:<\|python_tag\|>|```json)?\s*(?:\{\s*"tool_calls"\s*:\s*)?(?:\[\s*)?'
_FIRST_HEAD = re.compile(OBJECT_HEAD.format(between=_AROUND))
_NEXT_HEAD = re.compile(OBJECT_HEAD.format(between=NEXT_IN_LIST))


def begin(text: str, at: int, tools: Tools) -> Begun | None:
    head = (_NEXT_HEAD if at else _FIRST_HEAD).match(text, at)
    return None if head is None or head[1] not in tools else Begun(head[1], head.end(), JsonReader())


def calls_of(value: Any, tools: Tools) -> tuple[Call, ...]:
    """One call, a list of calls, or an object that has such a list. Raises NoCall if any of them is none."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    if isinstance(value, list) and not value:
        raise NoCall
    return tuple(call_of(one, tools) for one in (value if isinstance(value, list) else [value]))


LLAMA3 = CallFormat(
    name="llama3",
    signs=(PYTHON_TAG, "Environment: ipython"),
    openings=(PYTHON_TAG,),
    heads=("{",),
    take=take,
    markers=(PYTHON_TAG,),
    begin=begin,
)
GENERIC = CallFormat(name="generic", signs=(), openings=(), heads=("{", "[", FENCE), take=take, begin=begin)
