"""Calls between `<tool_call>` and `</tool_call>`: JSON (Hermes, Qwen), functions and parameters in tags (Qwen-coder),
or a name with keys and values in tags (GLM). What is inside tells which."""

from __future__ import annotations

import re

from app.engine.text.calls.base import (
    CallFormat,
    NoCall,
    Taken,
    Tools,
    behind,
    call_of,
    json_at,
    may_become,
    named_call,
    object_end,
    parameter_schema,
    skip_spaces,
    typed_value,
    wait,
)
from app.engine.text.calls.readers import Begun, JsonReader, TagReader, Tags

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(r"\s*([^\s<{]+)\s*(?=<arg_key>|</tool_call>|$)")


def take(text: str, tools: Tools, is_final: bool) -> Taken | None:
    if text.startswith(FUNCTION):
        return _function(text, 0, tools, is_final, closing="")
    at = skip_spaces(text, len(OPENING))
    if at == len(text):
        return wait(is_final)
    if text[at] == "{":
        return _json(text, at, tools, is_final)
    if text.startswith(FUNCTION, at):
        return _function(text, at, tools, is_final, closing=CLOSING)
    if may_become(text, at, FUNCTION):
        return wait(is_final)
    return _pairs(text, at, tools, is_final)


_JSON_HEAD = re.compile(r'<tool_call>\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FUNCTION_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>")
_PAIRS_HEAD = re.compile(r"<tool_call>\s*([^\s<{]+)\s*(?=<arg_key>|</tool_call>)")

_FUNCTION_TAGS = Tags(re.compile(r"<parameter=([^>\n]+)>"), "</parameter>", FUNCTION_END, trims=True)
_PAIR_TAGS = Tags(re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL), "</arg_value>", CLOSING)


def begin(text: str, at: int, tools: Tools) -> Begun | None:
    if at:
        return None
    if (head := _JSON_HEAD.match(text)) is not None:
        return Begun(head[1], head.end(), JsonReader()) if head[1] in tools else None
    for pattern, tags in ((_FUNCTION_HEAD, _FUNCTION_TAGS), (_PAIRS_HEAD, _PAIR_TAGS)):
        if (head := pattern.match(text)) is not None:
            name = head[1].strip()
            return Begun(name, head.end(), TagReader(tags, tools, name)) if name in tools else None
    return None


def tail(text: str, at: int, is_final: bool) -> int | None:
    if text.endswith(CLOSING, 0, at):
        return at
    end = at if text.endswith(FUNCTION_END, 0, at) else object_end(text, at, is_final)
    return None if end is None else behind(text, end, CLOSING, is_final=is_final)


def _json(text: str, at: int, tools: Tools, is_final: bool) -> Taken | None:
    found = json_at(text, at)
    if found is None:
        return wait(is_final)
    end = behind(text, found[1], CLOSING, is_final=is_final)
    return None if end is None else Taken((call_of(found[0], tools),), end)


def _function(text: str, at: int, tools: Tools, is_final: bool, closing: str) -> Taken | None:
    end = text.find(FUNCTION_END, at)
    while end >= 0 and closing:  # the end of the call is the one that the closing tag follows
        after = skip_spaces(text, end + len(FUNCTION_END))
        if text.startswith(closing, after) or is_final:
            break
        if may_become(text, after, closing):
            return None
        end = text.find(FUNCTION_END, end + 1)
    head = _FUNCTION.match(text, at)
    if end < 0:
        return wait(is_final)
    if head is None:
        raise NoCall
    name = head[1].strip()
    arguments = {
        key.strip(): typed_value(raw, parameter_schema(tools, name, key.strip()))
        for key, raw in _PARAMETER.findall(text[head.end() : end])
    }
    call = named_call(name, arguments, tools)
    last = behind(text, end + len(FUNCTION_END), closing or CLOSING, is_final=is_final)
    return None if last is None else Taken((call,), last)


def _pairs(text: str, at: int, tools: Tools, is_final: bool) -> Taken | None:
    end = text.find(CLOSING, at)
    if end < 0:
        return wait(is_final)
    head = _NAME.match(text, at, end)
    if head is None:
        raise NoCall
    arguments = {
        key.strip(): typed_value(raw, parameter_schema(tools, head[1], key.strip()))
        for key, raw in _PAIR.findall(text[head.end() : end])
    }
    return Taken((named_call(head[1], arguments, tools),), end + len(CLOSING))


FORMAT = CallFormat(
    name="tagged",
    signs=(OPENING, FUNCTION),
    openings=(OPENING, FUNCTION),
    take=take,
    markers=(OPENING, CLOSING),
    begin=begin,
    tail=tail,
)
