"""Gemma 4's calls: `<|tool_call>call:f{key:VALUE,...}<tool_call|>`, text between `<|"|>`, names bare."""

from __future__ import annotations

import re
from typing import Any

from app.engine.text.calls.base import CallFormat, NoCall, Taken, Tools, behind, json_at, named_call, skip_spaces
from app.engine.text.calls.readers import BareReader, Begun

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r'\s*(?:<\|"\|>)?([^:{}\[\],<]+?)(?:<\|"\|>)?\s*:')
_DEEPEST = 64


def take(text: str, tools: Tools, is_final: bool) -> Taken | None:
    end = text.find(CLOSING)
    if end < 0 and not is_final:
        return None
    head = _HEAD.match(text, len(OPENING))
    if head is None:
        raise NoCall
    arguments, _ = _value(text, head.end(), 0)
    return Taken((named_call(head[1], arguments, tools),), len(text) if end < 0 else end + len(CLOSING))


def begin(text: str, at: int, tools: Tools) -> Begun | None:
    head = None if at else _HEAD.match(text, len(OPENING))
    return None if head is None or head[1] not in tools else Begun(head[1], head.end(), BareReader(QUOTE))


def tail(text: str, at: int, is_final: bool) -> int | None:
    return behind(text, at, CLOSING, is_final=is_final)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. Raises NoCall."""
    at = skip_spaces(text, at)
    if depth > _DEEPEST or at >= len(text):
        raise NoCall
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise NoCall
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text[at] in "{[":
        return _container(text, at, depth)
    found = json_at(text, at)
    if found is None:
        raise NoCall
    return found


def _container(text: str, at: int, depth: int) -> tuple[Any, int]:
    is_object, closing = text[at] == "{", "}" if text[at] == "{" else "]"
    members: dict[str, Any] = {}
    items: list[Any] = []
    at = skip_spaces(text, at + 1)
    while not text.startswith(closing, at):
        key = ""
        if is_object:
            match = _KEY.match(text, at)
            if match is None:
                raise NoCall
            key, at = match[1].strip(), match.end()
        value, at = _value(text, at, depth + 1)
        members[key] = value
        items.append(value)
        at = skip_spaces(text, at)
        if text.startswith(",", at):
            at = skip_spaces(text, at + 1)
        elif not text.startswith(closing, at):
            raise NoCall
    return members if is_object else items, at + 1


FORMAT = CallFormat(
    name="gemma4",
    signs=(OPENING,),
    openings=(OPENING,),
    take=take,
    markers=(OPENING, CLOSING, QUOTE),
    begin=begin,
    tail=tail,
)
