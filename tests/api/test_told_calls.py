"""Templates that know no tools: the model is told of them, of its calls and of their results in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import client_for
from tests.api.support import CHAT, HI
from tests.api.test_tools import TOOLS
from tests.fakes.engine import CHATML, FakeEngine

#: Refuses all but users and assistants who take turns.
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must take turns') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    entries = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": entries}


def result(i: int, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{i}", "content": content}


async def turns_told(template: str, messages: list[dict[str, Any]], **body: Any) -> list[tuple[str, str]]:
    engine = FakeEngine(template=template)
    async with client_for(engine) as client:
        response = await client.post(CHAT, json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt, show_special=True)
    parts = [part.removesuffix("<|im_end|>\n") for part in prompt.split("<|im_start|>")[1:-1]]
    return [(role, text) for role, _, text in (part.partition("\n") for part in parts)]


@pytest.mark.parametrize("template", [CHATML, ALTERNATES], ids=["chatml", "alternates"])
@pytest.mark.parametrize("offered", [True, False])
async def test_a_conversation_of_calls(template: str, offered: bool) -> None:
    messages = [
        *HI,
        called(("add", '{"a": 2, "b": 3}'), ("time", {"zone": "UTC"}), content="Let me see."),
        result(0, "5"),
        result(1, [{"type": "text", "text": "noon"}]),
        {"role": "user", "content": "Thanks."},
        called(("add", "")),
        result(0, None),
    ]
    told = await turns_told(template, messages, **({"tools": TOOLS} if offered else {}))
    assert [role for role, _ in told][-5:] == ["user", "assistant", "user", "assistant", "user"]
    (_, first), (_, call), (_, answered), (_, again), (_, last) = told[-5:]
    if offered:
        assert '"name": "add"' in told[0][1] and "tool_results" in told[0][1]
    assert first.endswith("hi")
    said, _, entries = call.partition("\n\n")
    assert said == "Let me see." and json.loads(entries)["tool_calls"] == [
        {"name": "add", "arguments": {"a": 2, "b": 3}},
        {"name": "time", "arguments": {"zone": "UTC"}},
    ]
    results, _, thanks = answered.partition("\n\n")
    assert thanks == "Thanks." and json.loads(results)["tool_results"] == [
        {"name": "add", "content": "5"},
        {"name": "time", "content": "noon"},
    ]
    assert json.loads(again)["tool_calls"] == [{"name": "add", "arguments": {}}]
    assert json.loads(last)["tool_results"] == [{"name": "add", "content": ""}]


async def test_results_of_calls_nobody_made() -> None:
    told = await turns_told(CHATML, [*HI, {"role": "assistant", "content": "?"}, result(7, "5")])
    assert told[-1] == ("user", '{"tool_results": [{"content": "5"}]}')


async def test_calls_that_are_no_json_are_told_as_they_are() -> None:
    told = await turns_told(CHATML, [*HI, called(("add", '{"a": 2')), result(0, "what?")])
    assert json.loads(told[-2][1])["tool_calls"] == [{"name": "add", "arguments": '{"a": 2'}]
