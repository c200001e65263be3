"""Grammars of calls allow what each family writes, and what the parser reads; and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.api.context import VocabularyMarks
from app.engine.grammar import Grammars
from app.engine.request import Constraint
from app.engine.text.call_grammar import call_grammar
from app.engine.text.calls import deepseek, gemma4, harmony_call, invoke, mistral, plain_json, tagged
from app.engine.text.calls.base import CallFormat
from app.engine.text.tool_calls import GENERIC
from app.errors import InvalidParameter, NoTokenLeft
from tests.fakes.engine import SPECIAL, FakeTokenizer

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "note": {"type": "string"}, "how": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"add": ADD, "time": TIME}

KIMI_CALL = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|>'
#: A family, its template as far as it is looked at, calls of two tools, and the same with something wrong.
CASES: dict[str, tuple[CallFormat, str, str, str]] = {
    "hermes": (
        tagged.FORMAT,
        "",
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"note": "x"}}\n</tool_call>',
    ),
    "coder": (
        tagged.FORMAT,
        "<function=",
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\nsay </x>\n</parameter>\n"
        "<parameter=how>\ny\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=how>\nz\n</parameter>\n</function>",
    ),
    "glm": (
        tagged.FORMAT,
        "<arg_key>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>note</arg_key>\n"
        "<arg_value>say </x>\n</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>two</arg_value>\n</tool_call>",
    ),
    "llama3": (
        plain_json.LLAMA3,
        "",
        '{"name": "add", "parameters": {"a": 2, "note": "n"}}',
        '{"name": "add", "parameters": {"a": 200}}',
    ),
    "mistral": (
        mistral.FORMAT,
        "",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}, {"name": "time", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "other", "arguments": {}}]',
    ),
    "mistral ids": (
        mistral.FORMAT,
        "[ARGS] [CALL_ID]",
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 2}[TOOL_CALLS]time[CALL_ID]abcdefghj[ARGS]{}',
        '[TOOL_CALLS]add[CALL_ID]short[ARGS]{"a": 2}',
    ),
    "deepseek": (
        deepseek.DEEPSEEK,
        "",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": null}<｜tool▁call▁end｜>',
    ),
    "kimi": (
        deepseek.KIMI,
        "",
        f"<|tool_calls_section_begin|>{KIMI_CALL}<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        KIMI_CALL,
    ),
    "dsml": (
        invoke.DSML,
        "",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="true">a </x> b</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">',
    ),
    "dsml v4": (
        invoke.DSML,
        "<｜DSML｜tool_calls>",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "<｜DSML｜function_calls>",
    ),
    "minimax": (
        invoke.MINIMAX,
        "",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
        '<parameter name="note">a </x>\nb</parameter>\n</invoke>\n<invoke name="time">\n</invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="add">\n</invoke>',
    ),
    "gemma4": (
        gemma4.FORMAT,
        "",
        '<|tool_call>call:add{a:2,note:<|"|>a, {b}<|"|>,how:<|"|>x<|"|>}<tool_call|>'
        "<|tool_call>call:time{}<tool_call|>",
        '<|tool_call>call:add{note:<|"|>n<|"|>}<tool_call|>',
    ),
    "harmony": (
        harmony_call.FORMAT,
        "",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 2}',
        "<|channel|>final<|message|>",
    ),
    "generic": (
        GENERIC,
        "",
        '{"tool_calls": [{"name": "add", "arguments": {"a": 2}}, {"name": "time", "arguments": {}}]}',
        '{"tool_calls": []}',
    ),
}
TAGS = sorted(
    {
        *(tag for family, *_ in CASES.values() for tag in family.markers),
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>"),
    }
)


class Tagged(FakeTokenizer):
    """Bytes, and a control token for each tag."""

    vocab_size = FakeTokenizer.vocab_size + len(TAGS)
    _tags = {256 + len(SPECIAL) + i: tag.encode() for i, tag in enumerate(TAGS)}

    def is_control(self, token: int) -> bool:
        return token >= 256

    def token_id(self, text: str) -> int | None:
        return next((token for token, tag in self._tags.items() if tag == text.encode()), None)

    def piece(self, token: int, *, show_special: bool) -> bytes:
        if token in self._tags:
            return self._tags[token] if show_special else b""
        return super().piece(token, show_special=show_special)

    def tokens(self, text: str) -> Sequence[int]:
        data, tokens = text.encode(), []
        while data:
            found = next((token for token, tag in self._tags.items() if data.startswith(tag)), None)
            tokens.append(data[0] if found is None else found)
            data = data[1 if found is None else len(self._tags[found]) :]
        return tokens


class Plain(FakeTokenizer):
    """Bytes alone: every tag is text."""

    def token_id(self, text: str) -> int | None:
        return None

    def tokens(self, text: str) -> Sequence[int]:
        return text.encode()


@pytest.fixture(params=[Plain, Tagged], ids=["text", "control tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


def follows(tokenizer: Any, grammar: str, text: str) -> bool:
    """Whether the grammar allows the text, and that it ends there."""
    matcher = Grammars(tokenizer).matcher(Constraint(kind="lark", source=grammar, param="tools"))
    tokens = tokenizer.tokens(text)
    for i, token in enumerate(tokens):
        mask = matcher.mask()
        if not mask[token >> 3] >> (token & 7) & 1:
            return False
        try:
            if matcher.push(token):
                return i == len(tokens) - 1
        except NoTokenLeft:
            return False
    mask = matcher.mask()
    return any(mask[token >> 3] >> (token & 7) & 1 for token in tokenizer.eog)


def grammar_of(tokenizer: Any, name: str, tools: Any = TOOLS, *, several: bool = True) -> str:
    family, source, _, _ = CASES[name]
    return call_grammar(family, source, tools, VocabularyMarks(tokenizer), several=several)


@pytest.mark.parametrize("name", CASES)
def test_calls_as_the_family_writes_them(tokenizer: Any, name: str) -> None:
    _, _, right, wrong = CASES[name]
    if name == "harmony" and isinstance(tokenizer, Plain):
        pytest.skip("the tags of this family are always tokens")
    grammar = grammar_of(tokenizer, name)
    assert follows(tokenizer, grammar, right)
    assert not follows(tokenizer, grammar, wrong) and not follows(tokenizer, grammar, right[:-1])
    assert not follows(tokenizer, grammar, "Hi." + right)


@pytest.mark.parametrize("name", set(CASES) - {"llama3", "harmony", "dsml v4"})
def test_one_call_where_only_one_may_be(tokenizer: Any, name: str) -> None:
    assert not follows(tokenizer, grammar_of(tokenizer, name, several=False), CASES[name][2])


NESTED = {
    "type": "object",
    "properties": {
        "x": {"$ref": "#/$defs/Node"},
        "n": {"type": ["number", "null"]},
        "l": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "maxItems": 2},
    },
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"v": {"const": "r"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
            "required": ["v"],
        }
    },
}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{x:{v:<|"|>r<|"|>,kids:[{v:<|"|>r<|"|>},{v:<|"|>r<|"|>}]},n:-2.5,l:[true,<|"|>a<|"|>]}', True),
        ("{n:null,l:[]}", True),
        ("{l:[false]}", True),
        ("{}", True),
        ('{x:{v:<|"|>g<|"|>}}', False),
        ("{l:[true,true,true]}", False),
        ("{n:[]}", False),
        ("{l:[1]}", False),
    ],
)
def test_gemmas_notation_nests(tokenizer: Any, text: str, is_right: bool) -> None:
    grammar = grammar_of(tokenizer, "gemma4", {"f": NESTED})
    assert follows(tokenizer, grammar, f"<|tool_call>call:f{text}<tool_call|>") == is_right


@pytest.mark.parametrize("name", ["coder", "glm", "dsml", "minimax", "gemma4"])
@pytest.mark.parametrize("keyword", [{"pattern": "^a$"}, {"format": "date"}], ids=str)
def test_keywords_that_the_notation_cannot_be_held_to(name: str, keyword: dict[str, str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **keyword}}}
    with pytest.raises(InvalidParameter, match=next(iter(keyword))) as caught:
        grammar_of(Plain(), name, {"f": schema})
    assert caught.value.param == "tools.f.parameters"


@pytest.mark.parametrize("name", ["coder", "glm", "minimax", "gemma4"])
def test_lengths_of_text(tokenizer: Any, name: str) -> None:
    text = {"type": "string", "minLength": 2, "maxLength": 3}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    family, source, *_ = CASES[name]
    shapes = {
        "coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "gemma4": '<|tool_call>call:f{{a:<|"|>{}<|"|>}}<tool_call|>',
    }
    grammar = call_grammar(family, source, {"f": schema}, VocabularyMarks(tokenizer), several=False)
    fits = [follows(tokenizer, grammar, shapes[name].format(json.dumps("x" * n)[1:-1])) for n in range(1, 5)]
    assert fits == [False, True, True, False]
