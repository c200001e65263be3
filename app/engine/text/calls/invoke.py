"""Calls as `<invoke name="f">` with `<parameter name="p">`: MiniMax, and with a prefix DeepSeek since V3.2."""

from __future__ import annotations

import json
import re

from app.engine.text.calls.base import CallFormat, NoCall, Taken, Tools, named_call, parameter_schema, typed_value
from app.engine.text.calls.readers import Begun, TagReader, Tags

_DSML = "｜DSML｜"
_DSML_AROUND = tuple(f"<{slash}{_DSML}{name}>" for name in ("function_calls", "tool_calls") for slash in ("", "/"))
_MINIMAX_AROUND = ("<minimax:tool_call>", "</minimax:tool_call>")


def _take(text: str, tools: Tools, is_final: bool, prefix: str, around: tuple[str, ...]) -> Taken | None:
    for tag in around:
        if text.startswith(tag):
            return Taken((), len(tag))
    closing = f"</{prefix}invoke>"
    end = text.find(closing)
    if end < 0:
        if is_final:
            raise NoCall
        return None
    head = re.match(rf'<{prefix}invoke name="([^"]*)">', text)
    if head is None:
        raise NoCall
    parameter = rf'<{prefix}parameter name="([^"]*)"(?: string="(true|false)")?>(.*?)</{prefix}parameter>'
    arguments = {}
    for key, is_text, raw in re.findall(parameter, text[head.end() : end], re.DOTALL):
        schema = {"type": "string"} if is_text == "true" else parameter_schema(tools, head[1], key)
        arguments[key] = _json_or_text(raw) if is_text == "false" else typed_value(raw, schema)
    return Taken((named_call(head[1], arguments, tools),), end + len(closing))


def _json_or_text(raw: str) -> object:
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return value


def _tags(prefix: str, mark: str) -> Tags:
    opening = re.compile(rf'<{prefix}parameter name="([^"]*)"{mark}>')
    return Tags(opening, f"</{prefix}parameter>", f"</{prefix}invoke>")


_TAGS = {"": _tags("", ""), _DSML: _tags(_DSML, r'(?: string="(true|false)")?')}


def _begin(text: str, at: int, tools: Tools, prefix: str) -> Begun | None:
    head = None if at else re.match(rf'<{prefix}invoke name="([^"]*)">', text)
    if head is None or head[1] not in tools:
        return None
    return Begun(head[1], head.end(), TagReader(_TAGS[prefix], tools, head[1]))


def begin_dsml(text: str, at: int, tools: Tools) -> Begun | None:
    return _begin(text, at, tools, _DSML)


def begin_minimax(text: str, at: int, tools: Tools) -> Begun | None:
    return _begin(text, at, tools, "")


def tail(text: str, at: int, is_final: bool) -> int | None:
    """The arguments end with the call."""
    return at


def take_dsml(text: str, tools: Tools, is_final: bool) -> Taken | None:
    return _take(text, tools, is_final, _DSML, _DSML_AROUND)


def take_minimax(text: str, tools: Tools, is_final: bool) -> Taken | None:
    return _take(text, tools, is_final, "", _MINIMAX_AROUND)


DSML = CallFormat(
    name="dsml",
    signs=(_DSML,),
    openings=(*_DSML_AROUND, f"<{_DSML}invoke "),
    take=take_dsml,
    markers=(_DSML,),
    begin=begin_dsml,
    tail=tail,
)
MINIMAX = CallFormat(
    name="minimax",
    signs=("<minimax:tool_call>",),
    openings=(*_MINIMAX_AROUND, "<invoke "),
    take=take_minimax,
    markers=_MINIMAX_AROUND,
    begin=begin_minimax,
    tail=tail,
)
