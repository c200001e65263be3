"""DeepSeek's calls up to V3.1, and Kimi's, which look alike: a section of calls, each with a name and JSON."""

from __future__ import annotations

import re

from app.engine.text.calls.base import CallFormat, NoCall, Taken, Tools, behind, json_at, named_call
from app.engine.text.calls.readers import Begun, JsonReader

_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_BODY = re.compile(r"\s*(?:function\s*<｜tool▁sep｜>)?\s*([^\s<]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*(?=\{)")

_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_BODY = re.compile(r"\s*((?:functions\.)?([^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{)")


def _take(text: str, tools: Tools, is_final: bool, around: tuple[str, ...], begin: str, end: str) -> Taken | None:
    for tag in around:
        if text.startswith(tag):
            return Taken((), len(tag))
    at = text.find(end)
    if at < 0 and not is_final:
        return None
    head = (_KIMI_BODY if begin == _KIMI_BEGIN else _BODY).match(text, len(begin))
    found = None if head is None else json_at(text, head.end())
    if head is None or found is None:
        raise NoCall
    name = head[head.re.groups]
    return Taken((named_call(name, found[0], tools),), len(text) if at < 0 else at + len(end))


def begin_deepseek(text: str, at: int, tools: Tools) -> Begun | None:
    head = None if at else _BODY.match(text, len(_BEGIN)) if text.startswith(_BEGIN) else None
    return None if head is None or head[1] not in tools else Begun(head[1], head.end(), JsonReader())


def begin_kimi(text: str, at: int, tools: Tools) -> Begun | None:
    head = None if at else _KIMI_BODY.match(text, len(_KIMI_BEGIN)) if text.startswith(_KIMI_BEGIN) else None
    if head is None or head[2] not in tools:
        return None
    return Begun(head[2], head.end(), JsonReader(), head[1])


def tail_deepseek(text: str, at: int, is_final: bool) -> int | None:
    """The arguments may stand in a fence, whose end comes before that of the call."""
    fenced = behind(text, at, "```", is_final=is_final)
    return None if fenced is None else behind(text, fenced, _END, is_final=is_final)


def tail_kimi(text: str, at: int, is_final: bool) -> int | None:
    return behind(text, at, _KIMI_END, is_final=is_final)


def take_deepseek(text: str, tools: Tools, is_final: bool) -> Taken | None:
    return _take(text, tools, is_final, _AROUND, _BEGIN, _END)


def take_kimi(text: str, tools: Tools, is_final: bool) -> Taken | None:
    return _take(text, tools, is_final, _KIMI_AROUND, _KIMI_BEGIN, _KIMI_END)


DEEPSEEK = CallFormat(
    name="deepseek",
    signs=(_BEGIN, "tool▁calls▁begin"),
    openings=(*_AROUND, _BEGIN),
    take=take_deepseek,
    markers=(*_AROUND, _BEGIN, _SEP, _END),
    begin=begin_deepseek,
    tail=tail_deepseek,
)
KIMI = CallFormat(
    name="kimi",
    signs=_KIMI_AROUND,
    openings=(*_KIMI_AROUND, _KIMI_BEGIN),
    take=take_kimi,
    markers=(*_KIMI_AROUND, _KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END),
    begin=begin_kimi,
    tail=tail_kimi,
)
