"""What public bug reports about other servers tell of templates, roles and fields, tried on this one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import client_for
from tests.api.support import ANY_PARAM, CHAT, HI, is_error, joined, sse_events
from tests.fakes.engine import FakeEngine

NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn here') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must take turns') }}{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)
MAPS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}(call {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}[assistant]"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"k":"v"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
DEVELOPER = {"role": "developer", "content": "Reply only with BANANA."}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def calling(**content: Any) -> dict[str, Any]:
    return {"role": "assistant", **content, "tool_calls": [CALL]}


QUESTION = said("user", "q")
CALLED = "[user]q[assistant](call lookup k=v)"
#: A case, a template, a conversation, and the prompt that it makes.
TAKEN: list[tuple[str, str, list[dict[str, Any]], str]] = [
    ("C01", NO_SYSTEM, [said("system", "S."), said("user", "q")], "<user>S.\nq</user><assistant>"),
    ("C02", ALTERNATES, [said("user", "a"), said("assistant", "b")], "[user] a[assistant] b"),
    *(
        ("C04", MAPS, [QUESTION, calling(**content), RESULT], f"{CALLED}[tool]42[assistant]")
        for content in ({"content": None}, {"content": ""}, {})
    ),
    ("C04", MAPS, [QUESTION, said("assistant", ""), said("user", "x")], "[user]q[assistant][user]x[assistant]"),
    ("C04", MAPS, [QUESTION, calling(), {**RESULT, "content": None}], f"{CALLED}[tool][assistant]"),
    ("C04", MAPS, [QUESTION, {**RESULT, "tool_call_id": "zz"}], "[user]q[tool]42[assistant]"),
    ("C07", NO_SYSTEM, [DEVELOPER, said("user", "x")], "<user>Reply only with BANANA.\nx</user><assistant>"),
    ("C07", MAPS, [DEVELOPER, said("user", "x")], "[system]Reply only with BANANA.[user]x[assistant]"),
    (
        "C07",
        MAPS,
        [said("user", "x"), DEVELOPER, said("user", "y")],
        "[user]x[system]Reply only with BANANA.[user]y[assistant]",
    ),
]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("case", "template", "messages", "prompt"), TAKEN, ids=[row[0] for row in TAKEN])
async def test_taken(case: str, template: str, messages: list[dict[str, Any]], prompt: str, streamed: bool) -> None:
    engine = FakeEngine(template=template)
    async with client_for(engine) as client:
        response = await client.post(CHAT, json={"messages": messages, "stream": streamed})
        assert response.status_code == 200, response.text
    shown = engine.tokenizer.decode(engine.requests[0].prompt, show_special=True)
    assert shown.removeprefix("<s>") == prompt


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("C02", ALTERNATES, {"messages": [said("user", "a"), said("user", "b")]}),
    ("C02", ALTERNATES, {"messages": [said("assistant", "a"), said("user", "b")]}),
    ("C02", ALTERNATES, {"messages": []}),
    ("C02", ALTERNATES, {"messages": [said("narrator", "x")]}),
    ("C02", ALTERNATES, {"messages": [{"content": "x"}]}),
    *(
        ("C02", template, {"messages": HI})
        for template in (
            "{{ undefined.x.y }}",
            "{{ 'a' * 10**9 }}",
            "{% for i in range(10**12) %}{% endfor %}",
            "{{ ''.__class__.__mro__ }}",
        )
    ),
    ("C04", MAPS, {"messages": [said("user", None)]}),
    *(("D05", MAPS, {"messages": HI, "n": n}) for n in (0, -1, 129, 1.5)),
    ("D06", MAPS, {"messages": HI, "top_logprobs": 3}),
    ("D06", MAPS, {"messages": HI, "logprobs": True, "top_logprobs": 21}),
    *(("D07", MAPS, {"messages": HI, name: -1}) for name in ("max_tokens", "max_completion_tokens")),
    *(("D08", MAPS, {"messages": HI, "seed": seed}) for seed in (2**63, 2**64, "42")),
    *(("D08", MAPS, {"messages": HI, "temperature": value}) for value in (2.1, -1)),
    ("D08", MAPS, {"messages": HI, "top_p": 1.1}),
]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("case", "template", "body"), REFUSED, ids=[row[0] for row in REFUSED])
async def test_refused_before_anything_is_sent(case: str, template: str, body: dict[str, Any], streamed: bool) -> None:
    async with client_for(FakeEngine(template=template)) as client:
        is_error(await client.post(CHAT, json={**body, "stream": streamed}), 400, ANY_PARAM)
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
async def test_numbers_that_json_does_not_have(number: str) -> None:
    """D08."""
    async with client_for(FakeEngine()) as client:
        body = '{"messages": [{"role": "user", "content": "hi"}], "temperature": ' + number + "}"
        is_error(await client.post(CHAT, content=body), 400, ANY_PARAM)


@pytest.mark.parametrize("asked", [None, False, True], ids=str)
async def test_the_usage_chunk(asked: bool | None) -> None:
    """D01: one more chunk, without choices, before the end mark, and only where it was asked for."""
    async with client_for(FakeEngine()) as client:
        options = None if asked is None else {"include_usage": asked}
        response = await client.post(CHAT, json={"messages": HI, "stream": True, "stream_options": options})
    events = sse_events(response.text)
    *chunks, done = events
    assert done == "[DONE]" and len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if asked:
        *chunks, last = chunks
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == len("Hello from the fake engine.")
    assert all(len(chunk["choices"]) == 1 and not chunk.get("usage") for chunk in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and joined(events) == "Hello from the fake engine."
