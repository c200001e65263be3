"""Calls come out the same however the text is cut, and markup never shows."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from app.engine.text.calls import deepseek, gemma4, harmony_call, invoke, mistral, plain_json, tagged
from app.engine.text.calls.base import Call, CallFormat, typed_value
from app.engine.text.tool_calls import FORMATS, GENERIC, CallParser, call_format_of

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}}}
TIME = {"type": "object", "properties": {"zone": {"type": "string"}}}
TOOLS = {"add": ADD, "time": TIME}
WANTED = [("add", {"a": 2, "b": 3}), ("time", {"zone": "UTC"})]

DSML_CALLS = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="time">\n'
    '<｜DSML｜parameter name="zone" string="true">UTC</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)

#: Two calls as each family writes them.
TWO_CALLS: list[tuple[str, CallFormat, str]] = [
    (
        "hermes",
        tagged.FORMAT,
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>',
    ),
    (
        "coder",
        tagged.FORMAT,
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=time>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "coder without its tag",
        tagged.FORMAT,
        "<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<function=time>\n<parameter=zone>\nUTC\n</parameter>\n</function>",
    ),
    (
        "glm",
        tagged.FORMAT,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>time\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call>",
    ),
    (
        "llama3",
        plain_json.LLAMA3,
        '{"name": "add", "parameters": {"a": 2, "b": 3}}; {"name": "time", "parameters": {"zone": "UTC"}}',
    ),
    (
        "llama3 with its tag",
        plain_json.LLAMA3,
        '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}};'
        '<|python_tag|>{"name": "time", "parameters": {"zone": "UTC"}}',
    ),
    (
        "mistral list",
        mistral.FORMAT,
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "abcdefghi"}, '
        '{"name": "time", "arguments": {"zone": "UTC"}, "id": "jklmnopqr"}]',
    ),
    (
        "mistral ids",
        mistral.FORMAT,
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 2, "b": 3}'
        '[TOOL_CALLS]time[CALL_ID]jklmnopqr[ARGS]{"zone": "UTC"}',
    ),
    ("mistral names", mistral.FORMAT, '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}[TOOL_CALLS]time[ARGS]{"zone": "UTC"}'),
    (
        "deepseek v3",
        deepseek.DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 2, "b": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n'
        '{"zone": "UTC"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "deepseek v3.1",
        deepseek.DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2, "b": 3}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>time<｜tool▁sep｜>{"zone": "UTC"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "kimi",
        deepseek.KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 2, "b": 3}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>'
        '{"zone": "UTC"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    ("dsml", invoke.DSML, DSML_CALLS),
    (
        "minimax",
        invoke.MINIMAX,
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
        '<parameter name="b">3</parameter>\n</invoke>\n'
        '<invoke name="time">\n<parameter name="zone">UTC</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "gemma4",
        gemma4.FORMAT,
        '<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_call>call:time{zone:<|"|>UTC<|"|>}<tool_call|>',
    ),
    (
        "generic",
        GENERIC,
        '{"tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}, '
        '{"name": "time", "arguments": {"zone": "UTC"}}]}',
    ),
    (
        "generic in a fence",
        GENERIC,
        '```json\n[{"name": "add", "arguments": {"a": 2, "b": 3}}, '
        '{"name": "time", "arguments": {"zone": "UTC"}}]\n```',
    ),
]
FAMILIES = pytest.mark.parametrize(
    ("family", "text"), [row[1:] for row in TWO_CALLS], ids=[row[0] for row in TWO_CALLS]
)


def parse(parser: CallParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    out = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    calls = [(item.name, json.loads(item.arguments)) for item in out if isinstance(item, Call)]
    return "".join(item for item in out if isinstance(item, str)), calls


def cuts(text: str) -> list[list[str]]:
    """The text as one piece, character by character, in two at every place, and at random."""
    rng = random.Random(len(text))
    ways = [[text], list(text), *[[text[:at], text[at:]] for at in range(1, len(text))]]
    for _ in range(20):
        places = [0, *sorted(rng.sample(range(1, len(text)), min(8, len(text) - 1))), len(text)]
        ways.append([text[one:other] for one, other in zip(places, places[1:], strict=False)])
    return ways


@FAMILIES
def test_two_calls_however_cut(family: CallFormat, text: str) -> None:
    for pieces in cuts(text):
        assert parse(CallParser(family, TOOLS), pieces) == ("", WANTED), pieces


@FAMILIES
def test_at_most_one_call(family: CallFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(CallParser(family, TOOLS, most=1), pieces) == ("", WANTED[:1])


@FAMILIES
def test_a_preamble_stays_and_the_space_around_calls_goes(family: CallFormat, text: str) -> None:
    if not family.openings:
        return
    if text.startswith(family.heads or "\0"):
        text = "<|python_tag|>" + text
    for pieces in cuts(f"I will < look [ it up.\n\n{text}\n"):
        assert parse(CallParser(family, TOOLS), pieces) == ("I will < look [ it up.", WANTED), pieces


@FAMILIES
def test_what_nobody_offered_is_text(family: CallFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        said, calls = parse(CallParser(family, {"other": {}}), pieces)
        assert not calls and "add" in said and "time" in said


@pytest.mark.parametrize("family", [*FORMATS, GENERIC], ids=lambda family: family.name)
@pytest.mark.parametrize(
    "text", ["", " ", "Hi.", "a < b\n\n", '{"a": 1}', "{x}", "<tool", "[TOOL", "if (x) { y }", "`x`"]
)
def test_other_text_is_left_alone(family: CallFormat, text: str) -> None:
    for pieces in [[text], list(text)]:
        assert parse(CallParser(family, TOOLS), pieces) == (text, [])


def test_a_call_that_was_cut_short_is_text() -> None:
    text = 'Well.\n<tool_call>\n{"name": "add", "argum'
    for pieces in cuts(text):
        assert parse(CallParser(tagged.FORMAT, TOOLS), pieces) == (text, [])


def test_closing_tags_within_arguments() -> None:
    note = "</tool_call> and </function>"
    json_call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'note': note}})}</tool_call>"
    xml_call = f"<tool_call>\n<function=add>\n<parameter=note>\n{note}\n</parameter>\n</function>\n</tool_call>"
    for text in (json_call, xml_call.replace("</tool_call> and ", "")):
        for pieces in cuts(text):
            said, calls = parse(CallParser(tagged.FORMAT, TOOLS), pieces)
            assert said == "" and calls[0][1]["note"] in (note, "</function>"), pieces


def test_a_forgotten_closing_tag() -> None:
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n'
    text = one + '<tool_call>{"name": "time", "arguments": {"zone": "UTC"}}'
    for pieces in cuts(text):
        assert parse(CallParser(tagged.FORMAT, TOOLS), pieces) == ("", WANTED)


def test_harmony() -> None:
    text = ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 2, "b": 3}<|call|>'
    for pieces in cuts(text):
        parser = CallParser(harmony_call.FORMAT, TOOLS)
        out = [item for piece in pieces for item in parser.push_call(piece)] + parser.finish()
        assert out == [Call("add", '{"a": 2, "b": 3}')]


def test_arguments_nest_in_gemmas_notation() -> None:
    text = '<|tool_call>call:add{x:{list:[1,-2.5,true,null,<|"|>a, b}<|"|>],empty:{}},note:<|"|>"q"<|"|>}<tool_call|>'
    _, calls = parse(CallParser(gemma4.FORMAT, TOOLS), list(text))
    assert calls == [("add", {"x": {"list": [1, -2.5, True, None, "a, b}"], "empty": {}}, "note": '"q"'})]


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("[1]", {}, [1]),
        ("plain words", {"type": "integer"}, "plain words"),
        ("null", {"type": ["string", "null"]}, None),
        ("yes", {"enum": ["yes", "no"]}, "yes"),
    ],
)
def test_values_without_quotes(raw: str, schema: dict[str, Any], value: Any) -> None:
    assert typed_value(raw, schema) == value


@pytest.mark.parametrize("family", FORMATS, ids=lambda family: family.name)
def test_families_are_known_by_their_templates(family: CallFormat) -> None:
    assert call_format_of(f"x {family.signs[0]} y") is family
    assert call_format_of("nothing") is GENERIC
