"""Calls of gpt-oss: messages whose header names a function. The parser of its messages sets them apart already."""

from __future__ import annotations

import re

from app.engine.text.calls.base import CallFormat, NoCall, Taken, Tools, behind, json_at, named_call

_HEAD = re.compile(r".*?\bto=(?:functions\.)?([^\s<]+).*?<\|message\|>\s*", re.DOTALL)


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


FORMAT = CallFormat(
    name="harmony", signs=("<|channel|>analysis", "<|channel|>final", "<|channel|>commentary"), openings=(), take=take
)
