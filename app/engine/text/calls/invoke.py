"""Calls as `<invoke name="f">` with `<parameter name="p">`: MiniMax, and with a prefix DeepSeek since V3.2."""

from __future__ import annotations

import json
import re

from app.engine.text.calls.base import CallFormat, NoCall, Taken, Tools, named_call, parameter_schema, typed_value

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


def take_dsml(text: str, tools: Tools, is_final: bool) -> Taken | None:
    return _take(text, tools, is_final, _DSML, _DSML_AROUND)


def take_minimax(text: str, tools: Tools, is_final: bool) -> Taken | None:
    return _take(text, tools, is_final, "", _MINIMAX_AROUND)


DSML = CallFormat(
    name="dsml", signs=(_DSML,), openings=(*_DSML_AROUND, f"<{_DSML}invoke "), take=take_dsml, markers=(_DSML,)
)
MINIMAX = CallFormat(
    name="minimax",
    signs=("<minimax:tool_call>",),
    openings=(*_MINIMAX_AROUND, "<invoke "),
    take=take_minimax,
    markers=_MINIMAX_AROUND,
)
