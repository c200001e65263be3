"""Grammars in Lark's notation that make an answer consist of calls of tools, in the words of each family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from app.engine.text.calls.base import CallFormat, Tools
from app.engine.text.schema_check import checked_schema

#: A tag as the grammar names it: by the token that stands for it, or as text.
Literal = Callable[[str], str]
#: Keeps white space between the parts of arguments in bounds.
_GUIDANCE = {"whitespace_flexible": True, "whitespace_pattern": r"[ ]?|\n[ \t]{0,32}", "coerce_one_of": True}

#: Calls that may follow the first in an answer that must call.
_MORE = "{0,7}"

_text = json.dumps


def json_rule(source: str, param: str) -> str:
    """The right side of a rule for JSON that matches the schema in this JSON text. Raises InvalidParameter."""
    return f"%json {json.dumps({**checked_schema(source, param), 'x-guidance': _GUIDANCE})}"


def harmony_answer(schema: str, param: str, literal: Literal) -> str:
    """A grammar for an answer of gpt-oss: thoughts, if any, then a final message of JSON that matches the schema."""
    final = f'{literal("<|channel|>")} "final" {literal("<|message|>")}'
    return f"start: {_harmony_thought(literal)} {final} answer\nanswer: {json_rule(schema, param)}"


def call_grammar(family: CallFormat, source: str, tools: Tools, literal: Literal, *, several: bool) -> str | None:
    """A grammar for one call or more of these tools as `source`, the template, shows them; None for families without.

    Raises InvalidParameter that names the tool whose parameters cannot be held to.
    """
    write = _FAMILIES.get(family.name)
    if write is None or (family.name == "tagged" and "<arg_key>" in source):
        return None
    rules = {f"args_{i}": json_rule(json.dumps(schema), _param(name)) for i, (name, schema) in enumerate(tools.items())}
    start, more = write(source, list(tools), tools, literal, several)
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **more, **rules}.items())


def or_answer(calls: str, schema: str, param: str) -> str:
    """A grammar for what `calls` allows, or else JSON that matches the schema."""
    rest = calls.removeprefix("start: ")
    return f"start: calls | answer\nanswer: {json_rule(schema, param)}\ncalls: {rest}"


def _param(name: str) -> str:
    return f"tools.{name}.parameters"


Rules = tuple[str, Mapping[str, str]]


def _calls(names: list[str], pattern: Callable[[int, str], str]) -> dict[str, str]:
    """A rule `call` with one alternative per tool."""
    return {"call": " | ".join(pattern(i, name) for i, name in enumerate(names))}


def _json_call(arguments: str) -> Callable[[int, str], str]:
    def write(i: int, name: str) -> str:
        head = _text('{"name": ' + _text(name) + f', "{arguments}": ')
        return f'{head} args_{i} "}}"'

    return write


def _tagged(source: str, names: list[str], tools: Tools, literal: Literal, several: bool) -> Rules:
    opening, closing = literal("<tool_call>"), literal("</tool_call>")
    if "<function=" in source:
        more: dict[str, str] = {}
        more["call"] = " | ".join([_function(i, name, tools[name], more) for i, name in enumerate(names)])
    else:
        more = _calls(names, _json_call("arguments"))
    one = f'{opening} "\\n" call "\\n" {closing}'
    return f'{one} ("\\n" {one}){_MORE}' if several else one, more


def _function(i: int, name: str, schema: Mapping[str, Any], more: dict[str, str]) -> str:
    """A function with its parameters in tags: those required first, in the order of the schema."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    parts = [_text(f"<function={name}>\n")]
    for k, key in enumerate(sorted(properties, key=lambda key: key not in required)):
        rule, opening = f"value_{i}_{k}", _text(f"<parameter={key}>\n")
        if _is_text(properties[key]):
            more[f'{rule}[suffix="\\n</parameter>\\n"]'] = "/(?s:.*)/"
            parameter = f"{opening} {rule}"
        elif (texts := _texts(properties[key])) is not None:
            more[rule] = " | ".join(map(_text, texts))
            parameter = f'{opening} {rule} "\\n</parameter>\\n"'
        else:
            local = {"$defs": schema.get("$defs", {}), **properties[key]} if isinstance(properties[key], dict) else {}
            more[rule] = json_rule(json.dumps(local), _param(name))
            parameter = f'{opening} {rule} "\\n</parameter>\\n"'
        parts.append(parameter if key in required else f"({parameter})?")
    return " ".join([*parts, _text("</function>")])


def _texts(schema: Any) -> list[str] | None:
    """The only texts that match, where the schema lists texts alone."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    return (
        values
        if isinstance(values, list) and values and all(value and isinstance(value, str) for value in values)
        else None
    )


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema


def _llama3(source: str, names: list[str], tools: Tools, literal: Literal, several: bool) -> Rules:
    """This family calls one tool at a time."""
    return "call", _calls(names, _json_call("parameters"))


def _generic(source: str, names: list[str], tools: Tools, literal: Literal, several: bool) -> Rules:
    calls = f'call (", " call){_MORE}' if several else "call"
    opening = _text('{"tool_calls": [')
    return f'{opening} {calls} "]}}"', _calls(names, _json_call("arguments"))


def _mistral(source: str, names: list[str], tools: Tools, literal: Literal, several: bool) -> Rules:
    opening = literal("[TOOL_CALLS]")
    if "[ARGS]" not in source:
        calls = f'call (", " call){_MORE}' if several else "call"
        return f'{opening} "[" {calls} "]"', _calls(names, _json_call("arguments"))
    number = literal("[CALL_ID]") + " /[A-Za-z0-9]{9}/ " if "[CALL_ID]" in source else ""
    rules = _calls(names, lambda i, name: f"{_text(name)} {number}{literal('[ARGS]')} args_{i}")
    return f"{opening} call ({opening} call){_MORE}" if several else f"{opening} call", rules


def _deepseek(source: str, names: list[str], tools: Tools, literal: Literal, several: bool) -> Rules:
    first, last = literal("<｜tool▁calls▁begin｜>"), literal("<｜tool▁calls▁end｜>")
    begin, sep, end = (literal(f"<｜tool▁{name}｜>") for name in ("call▁begin", "sep", "call▁end"))

    def fenced(i: int, name: str) -> str:
        return f'{begin} "function" {sep} ' + _text(f"{name}\n```json\n") + f' args_{i} "\\n```" {end}'

    def bare(i: int, name: str) -> str:
        return f"{begin} {_text(name)} {sep} args_{i} {end}"

    rules = _calls(names, fenced if "```json" in source else bare)
    return f"{first} {f'call call{_MORE}' if several else 'call'} {last}", rules


def _harmony(source: str, names: list[str], tools: Tools, literal: Literal, several: bool) -> Rules:
    """Thoughts first, if any; then one call, since the answer ends with it."""
    channel, message = literal("<|channel|>"), literal("<|message|>")
    body = literal("<|constrain|>") + f' "json" {message}'
    rules = _calls(names, lambda i, name: f"{channel} {_text(f'commentary to=functions.{name} ')} {body} args_{i}")
    return f"{_harmony_thought(literal)} call", rules


def _harmony_thought(literal: Literal) -> str:
    """Control tokens are no text, so the thought ends where it says."""
    head = f'{literal("<|channel|>")} "analysis" {literal("<|message|>")}'
    return f'({head} /(?s:.*)/ {literal("<|end|>")} {literal("<|start|>")} "assistant")?'


_FAMILIES: Mapping[str, Callable[[str, list[str], Tools, Literal, bool], Rules]] = {
    "tagged": _tagged,
    "llama3": _llama3,
    "generic": _generic,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "harmony": _harmony,
}
