"""Calls come out the same however the text is cut, and markup never shows."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from app.engine.text.calls import deepseek, gemma4, harmony_call, invoke, mistral, plain_json, tagged
from app.engine.text.calls.base import CallArguments, CallBegin, CallFormat, typed_value
from app.engine.text.tool_calls import FORMATS, GENERIC, CallParser, Told, call_format_of

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


def told(out: list[Told]) -> tuple[str, list[tuple[str, str]]]:
    """Text, and calls with the text of their arguments."""
    calls: list[tuple[str, str]] = []
    for item in out:
        if isinstance(item, CallBegin):
            calls.append((item.name, ""))
        elif isinstance(item, CallArguments):
            assert item.text
            calls[-1] = calls[-1][0], calls[-1][1] + item.text
    return "".join(item for item in out if isinstance(item, str)), calls


def parse(parser: CallParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    text, calls = told([item for piece in pieces for item in parser.push(piece)] + parser.finish())
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


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
        assert told(out) == ("", [("add", '{"a": 2, "b": 3}')])


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


#: One call with much to say, as each family writes it: up to its arguments, and then those.
LONG = {"note": 'say "hi",\n\\ 漢🙂 <b> a < b' + " and on" * 20}
_TEXT = LONG["note"]
_JSON = json.dumps(LONG, ensure_ascii=False)
WRITTEN: list[tuple[CallFormat, str, str]] = [
    (tagged.FORMAT, f'<tool_call>\n{{"name": "add", "arguments": {_JSON}', "}\n</tool_call>"),
    (
        tagged.FORMAT,
        f"<tool_call>\n<function=add>\n<parameter=note>\n{_TEXT}",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    (tagged.FORMAT, f"<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>{_TEXT}", "</arg_value>\n</tool_call>"),
    (plain_json.LLAMA3, f'{{"name": "add", "parameters": {_JSON}', "}"),
    (mistral.FORMAT, f'[TOOL_CALLS][{{"name": "add", "arguments": {_JSON}', ', "id": "abcdefghi"}]'),
    (mistral.FORMAT, f"[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{_JSON}", ""),
    (
        deepseek.DEEPSEEK,
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{_JSON}",
        "\n```<｜tool▁call▁end｜>",
    ),
    (deepseek.KIMI, f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{_JSON}", "<|tool_call_end|>"),
    (
        invoke.DSML,
        f'<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="note" string="true">{_TEXT}',
        "</｜DSML｜parameter>\n</｜DSML｜invoke>",
    ),
    (invoke.MINIMAX, f'<invoke name="add">\n<parameter name="note">{_TEXT}', "</parameter>\n</invoke>"),
    (gemma4.FORMAT, f'<|tool_call>call:add{{note:<|"|>{_TEXT}<|"|>', "}<tool_call|>"),
    (GENERIC, f'{{"tool_calls": [{{"name": "add", "arguments": {_JSON}', "}]}"),
]
WRITINGS = pytest.mark.parametrize(("family", "text", "rest"), WRITTEN, ids=[row[0].name for row in WRITTEN])


@WRITINGS
def test_arguments_are_told_as_they_come(family: CallFormat, text: str, rest: str) -> None:
    parser = CallParser(family, TOOLS)
    out: list[Told] = []
    waits: list[int] = []
    for char in text:
        new = parser.push(char)
        out += new
        waits.append(0 if new else waits[-1] + 1 if waits else 1)
    _, [(name, arguments)] = told(out)
    assert name == "add" and len(arguments) > len(_JSON) - 8 and max(waits[-len(_TEXT) :]) < 8
    assert max(len(item.text) for item in out if isinstance(item, CallArguments)) < 40
    said, [(_, arguments)] = told([*out, *parser.push(rest), *parser.finish()])
    assert said == "" and json.loads(arguments) == LONG


@WRITINGS
def test_arguments_that_were_cut_short(family: CallFormat, text: str, rest: str) -> None:
    """What was told is what is there, whole or in pieces, and no markup."""
    for n_chars in range(len(text) - 60, len(text)):
        whole, single = (
            told_by(CallParser(family, TOOLS), pieces) for pieces in ([text[:n_chars]], list(text[:n_chars]))
        )
        assert whole == single and whole[0] == "" and _JSON.startswith(whole[1][0][1])


LISTS = [
    (GENERIC, '{"tool_calls": [', '"arguments"', "]}"),
    (mistral.FORMAT, "[TOOL_CALLS] [", '"arguments"', "]"),
]


@pytest.mark.parametrize(("family", "begin", "name", "end"), LISTS, ids=[row[0].name for row in LISTS])
def test_lists_that_were_cut_short_leave_no_markup(family: CallFormat, begin: str, name: str, end: str) -> None:
    one = f'{{"name": "add", {name}: {{"a": 2}}}}'
    first, text = f"{begin}{one}", f"{begin}{one}, {one}{end}"
    for n_chars in range(len(first) - 1, len(text) + 1):
        whole, single = (
            told_by(CallParser(family, TOOLS), pieces) for pieces in ([text[:n_chars]], list(text[:n_chars]))
        )
        assert whole == single and whole[0] == "" and whole[1][0] == ("add", '{"a": 2}'), text[:n_chars]


def test_what_is_no_end_of_a_list_is_text() -> None:
    one = '{"tool_calls": [{"name": "add", "arguments": {"a": 2}}'
    for rest in (", that was all", ', {"name": "none", "arguments": {"a"'):
        for pieces in cuts(one + rest):
            said, calls = told_by(CallParser(GENERIC, TOOLS), pieces)
            assert said == "}" + rest and calls == [("add", '{"a": 2}')]


def told_by(parser: CallParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    return told([item for piece in pieces for item in parser.push(piece)] + parser.finish())


def test_the_models_own_ids() -> None:
    for family, text, call_id in (
        (deepseek.KIMI, WRITTEN[7][1], "functions.add:0"),
        (mistral.FORMAT, WRITTEN[5][1], "abcdefghi"),
    ):
        begun = [item for item in CallParser(family, TOOLS).push(text) if isinstance(item, CallBegin)]
        assert begun == [CallBegin("add", call_id)]


def test_values_that_are_no_text_come_whole() -> None:
    parameters = "<parameter=a>\n12345\n</parameter>\n<parameter=x>\n[1, 2]\n</parameter>\n"
    text = f"<tool_call>\n<function=add>\n{parameters}</function>"
    parser = CallParser(tagged.FORMAT, TOOLS)
    out = [item for char in text for item in parser.push(char)]
    assert [item.text for item in out if isinstance(item, CallArguments)] == [
        '{"a": ',
        "12345",
        ', "x": ',
        "[1, 2]",
        "}",
    ]


def test_line_breaks_in_strings_are_forgiven() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"note": "a\nb\tc"}}</tool_call>'
    for pieces in cuts(text):
        assert parse(CallParser(tagged.FORMAT, TOOLS), pieces) == ("", [("add", {"note": "a\nb\tc"})])


def test_broken_arguments_end_the_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 2 oh well'
    for pieces in cuts(text):
        said, calls = told_by(CallParser(tagged.FORMAT, TOOLS), pieces)
        assert (said.strip(), calls) == ("oh well", [("add", '{"a": 2 ')])
