"""Calls of gpt-oss: messages whose header names a function. The parser of its messages sets them apart already."""

from __future__ import annotations

import re

from app.engine.text.calls.base import CallFormat, NoCall, Taken, Tools, behind, json_at, named_call
from app.engine.text.calls.readers import Begun, JsonReader

_HEAD = re.compile(r".*?\bto=(?:functions\.)?([^\s<]+).*?<\|message\|>\s*", re.DOTALL)
_JSON_HEAD = re.compile(_HEAD.pattern + r"(?=\{)", re.DOTALL)


def take(text: str, tools: Tools, is_final: bool) -> Taken | None:
    head = _HEAD.match(text)
    found = None if head is None else json_at(text, head.end())
    if head is None or found is None:
        if is_final or (head is not None and "<|call|>" in text[head.end() :]):
            raise NoCall
        return None
    call = named_call(head[1], found[0], tools)
    end = behind(text, found[1], "<|call|>", is_final=is_final)
    return None if end is None else Taken((call,), end)


def begin(text: str, at: int, tools: Tools) -> Begun | None:
    head = None if at else _JSON_HEAD.match(text)
    return None if head is None or head[1] not in tools else Begun(head[1], head.end(), JsonReader())


def tail(text: str, at: int, is_final: bool) -> int | None:
    return behind(text, at, "<|call|>", is_final=is_final)


FORMAT = CallFormat(
    name="harmony",
    signs=("<|channel|>analysis", "<|channel|>final", "<|channel|>commentary"),
    openings=(),
    take=take,
    begin=begin,
    tail=tail,
)
