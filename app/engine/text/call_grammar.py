"""Grammars in Lark's notation that make an answer consist of calls of tools, in the words of each family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from app.engine.text.bare_grammar import BareGrammar
from app.engine.text.calls.base import CallFormat, Tools
from app.engine.text.grammar_parts import Marks, json_rule, param_of, quoted
from app.engine.text.tag_grammar import CODER, DSML, GLM, MINIMAX, Notation, parameters, spelt

#: Calls that may follow the first in an answer that must call.
_MORE = "{0,7}"


def harmony_answer(schema: str, param: str, marks: Marks) -> str:
    """A grammar for an answer of gpt-oss: thoughts, if any, then a final message of JSON that matches the schema."""
    final = f'{marks.literal("<|channel|>")} "final" {marks.literal("<|message|>")}'
    return f"start: {_harmony_thought(marks)} {final} answer\nanswer: {json_rule(schema, param)}"


def call_grammar(family: CallFormat, source: str, tools: Tools, marks: Marks, *, several: bool) -> str:
    """A grammar for one call or more of these tools as `source`, the template, shows them.

    Raises InvalidParameter that names the tool whose parameters cannot be held to.
    """
    start, more = _FAMILIES[family.name](source, list(tools), tools, marks, several)
    used = " ".join((start, *more.values()))
    rules = {
        f"args_{i}": json_rule(json.dumps(schema), param_of(name))
        for i, (name, schema) in enumerate(tools.items())
        if re.search(rf"\bargs_{i}\b", used)
    }
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **more, **rules}.items())


def or_answer(calls: str, schema: str, param: str) -> str:
    """A grammar for what `calls` allows, or else JSON that matches the schema."""
    rest = calls.removeprefix("start: ")
    return f"start: calls | answer\nanswer: {json_rule(schema, param)}\ncalls: {rest}"


Rules = tuple[str, Mapping[str, str]]


def _calls(names: list[str], pattern: Callable[[int, str], str]) -> dict[str, str]:
    """A rule `call` with one alternative per tool."""
    return {"call": " | ".join(pattern(i, name) for i, name in enumerate(names))}


def _json_call(arguments: str) -> Callable[[int, str], str]:
    def write(i: int, name: str) -> str:
        head = quoted('{"name": ' + quoted(name) + f', "{arguments}": ')
        return f'{head} args_{i} "}}"'

    return write


def _tagged(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    opening, closing = marks.literal("<tool_call>"), marks.literal("</tool_call>")
    if "<arg_key>" in source:
        return _pairs(names, tools, marks, several)
    if "<function=" in source:
        more: dict[str, str] = {}
        parts = [
            (quoted(f"<function={name}>\n"), parameters(i, name, tools[name], more, marks, CODER), '"</function>"')
            for i, name in enumerate(names)
        ]
        more["call"] = " | ".join(" ".join(filter(None, part)) for part in parts)
    else:
        more = _calls(names, _json_call("arguments"))
    one = f'{opening} "\\n" call "\\n" {closing}'
    return f'{one} ("\\n" {one}){_MORE}' if several else one, more


def _pairs(names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    """GLM's calls."""
    more: dict[str, str] = {}
    parts = [(quoted(f"{name}\n"), parameters(i, name, tools[name], more, marks, GLM)) for i, name in enumerate(names)]
    more["call"] = " | ".join(" ".join(filter(None, part)) for part in parts)
    one = f"{marks.literal('<tool_call>')} call {marks.literal('</tool_call>')}"
    return f'{one} ("\\n" {one}){_MORE}' if several else one, more


def _invoke(names: list[str], tools: Tools, marks: Marks, several: bool, around: str, notation: Notation) -> Rules:
    more: dict[str, str] = {}
    tag = notation.tag
    ends = spelt(f"</{tag}invoke>\n", marks)
    parts = [
        (
            spelt(f'<{tag}invoke name="{name}">\n', marks),
            parameters(i, name, tools[name], more, marks, notation),
            ends,
        )
        for i, name in enumerate(names)
    ]
    more["call"] = " | ".join(" ".join(filter(None, part)) for part in parts)
    calls = f"call call{_MORE}" if several else "call"
    opening, closing = (spelt(f"<{slash}{tag}{around}>", marks) for slash in ("", "/"))
    return f'{opening} "\\n" {calls} {closing}', more


def _dsml(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    around = "tool_calls" if "DSML｜tool_calls" in source else "function_calls"
    return _invoke(names, tools, marks, several, around, DSML)


def _minimax(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    return _invoke(names, tools, marks, several, "minimax:tool_call", MINIMAX)


def _llama3(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    """This family calls one tool at a time."""
    return "call", _calls(names, _json_call("parameters"))


def _generic(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    calls = f'call (", " call){_MORE}' if several else "call"
    opening = quoted('{"tool_calls": [')
    return f'{opening} {calls} "]}}"', _calls(names, _json_call("arguments"))


def _mistral(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    opening = marks.literal("[TOOL_CALLS]")
    if "[ARGS]" not in source:
        calls = f'call (", " call){_MORE}' if several else "call"
        return f'{opening} "[" {calls} "]"', _calls(names, _json_call("arguments"))
    number = marks.literal("[CALL_ID]") + " /[A-Za-z0-9]{9}/ " if "[CALL_ID]" in source else ""
    rules = _calls(names, lambda i, name: f"{quoted(name)} {number}{marks.literal('[ARGS]')} args_{i}")
    return f"{opening} call ({opening} call){_MORE}" if several else f"{opening} call", rules


def _deepseek(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    first, last = marks.literal("<｜tool▁calls▁begin｜>"), marks.literal("<｜tool▁calls▁end｜>")
    begin, sep, end = (marks.literal(f"<｜tool▁{name}｜>") for name in ("call▁begin", "sep", "call▁end"))

    def fenced(i: int, name: str) -> str:
        return f'{begin} "function" {sep} ' + quoted(f"{name}\n```json\n") + f' args_{i} "\\n```" {end}'

    def bare(i: int, name: str) -> str:
        return f"{begin} {quoted(name)} {sep} args_{i} {end}"

    rules = _calls(names, fenced if "```json" in source else bare)
    return f"{first} {f'call call{_MORE}' if several else 'call'} {last}", rules


def _kimi(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    first, last = marks.literal("<|tool_calls_section_begin|>"), marks.literal("<|tool_calls_section_end|>")
    begin, end = marks.literal("<|tool_call_begin|>"), marks.literal("<|tool_call_end|>")
    arguments = marks.literal("<|tool_call_argument_begin|>")

    def one(i: int, name: str) -> str:
        return f"{begin} {quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {arguments} args_{i} {end}"

    rules = _calls(names, one)
    return f"{first} {f'call call{_MORE}' if several else 'call'} {last}", rules


def _gemma4(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    opening, closing = marks.literal("<|tool_call>"), marks.literal("<tool_call|>")
    more: dict[str, str] = {}
    calls = []
    for i, name in enumerate(names):
        bare = BareGrammar(f"bare_{i}", '<|"|>', param_of(name), marks)
        calls.append(f"{quoted(f'call:{name}')} {bare.start(tools[name])}")
        more |= bare.rules
    more["call"] = " | ".join(calls)
    one = f"{opening} call {closing}"
    return f"{one} ({one}){_MORE}" if several else one, more


def _harmony(source: str, names: list[str], tools: Tools, marks: Marks, several: bool) -> Rules:
    """Thoughts first, if any; then one call, since the answer ends with it."""
    channel, message = marks.literal("<|channel|>"), marks.literal("<|message|>")
    body = marks.literal("<|constrain|>") + f' "json" {message}'
    rules = _calls(names, lambda i, name: f"{channel} {quoted(f'commentary to=functions.{name} ')} {body} args_{i}")
    return f"{_harmony_thought(marks)} call", rules


def _harmony_thought(marks: Marks) -> str:
    """Control tokens are no text, so the thought ends where it says."""
    head = f'{marks.literal("<|channel|>")} "analysis" {marks.literal("<|message|>")}'
    return f'({head} /(?s:.*)/ {marks.literal("<|end|>")} {marks.literal("<|start|>")} "assistant")?'


_FAMILIES: Mapping[str, Callable[[str, list[str], Tools, Marks, bool], Rules]] = {
    "tagged": _tagged,
    "llama3": _llama3,
    "generic": _generic,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "harmony": _harmony,
    "kimi": _kimi,
    "gemma4": _gemma4,
    "dsml": _dsml,
    "minimax": _minimax,
}
