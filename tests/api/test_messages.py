"""Conversations and the templates they meet."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import client_for
from tests.api.support import ANY_PARAM, CHAT, is_error
from tests.fakes.engine import IM_START, FakeEngine

NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn here') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must take turns') }}{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}(call {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}[assistant]"
)
DEAF = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system message must be at the beginning') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
DEVELOPER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# knows 'developer' #}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


async def post(engine: FakeEngine, messages: list[Any], **fields: Any) -> httpx.Response:
    async with client_for(engine) as client:
        return await client.post(CHAT, json={"messages": messages, **fields})


async def prompt(template: str, messages: list[Any], **fields: Any) -> str:
    """What the engine gets to see, as text."""
    engine = FakeEngine(template=template)
    response = await post(engine, messages, **fields)
    assert response.status_code == 200, response.text
    return engine.tokenizer.decode(engine.requests[0].prompt[1:], show_special=True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_template_without_system_turns(streamed: bool) -> None:
    text = await prompt(NO_SYSTEM, [system("Answer in French."), user("Hi")], stream=streamed)
    assert text == "<user>Answer in French.\nHi</user><assistant>"


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_the_template_says_reaches_the_client(streamed: bool) -> None:
    reply = {"role": "assistant", "content": "b"}
    for messages in ([user("a"), user("b")], [reply, user("a")]):
        response = await post(FakeEngine(template=ALTERNATING), messages, stream=streamed)
        assert "turns must take turns" in is_error(response, 400, "messages")["message"]
    assert await prompt(ALTERNATING, [system("s"), user("a")], stream=streamed) == "[user] s\na"


@pytest.mark.parametrize(
    "template",
    [
        "{{ undefined.x.y }}",
        "{{ 'a' * 10**9 }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
async def test_broken_templates(template: str) -> None:
    is_error(await post(FakeEngine(template=template), [user("a")]), 400, ANY_PARAM)


async def test_late_and_several_system_messages() -> None:
    messages = [system("one"), user("a"), system("two"), user("b")]
    for template in (SYSTEM_FIRST, DEAF, NO_SYSTEM):
        text = await prompt(template, messages)
        assert text.index("one") < text.index("two") < text.index("b") and "a" in text
    assert await prompt(DEVELOPER, messages) == "[system]one[user]a[system]two[user]b"


@pytest.mark.parametrize("template", [NO_SYSTEM, SYSTEM_FIRST, DEAF, CALLS])
async def test_developer_is_system_to_templates_that_do_not_know_it(template: str) -> None:
    for at in range(3):
        texts = []
        for role in ("system", "developer"):
            messages = [user("a"), user("b")]
            messages.insert(at, system("BANANA", role))
            texts.append(await prompt(template, messages))
        assert texts[0] == texts[1] and "BANANA" in texts[0]


async def test_developer_where_it_is_known() -> None:
    assert await prompt(DEVELOPER, [system("x", "developer"), user("a")]) == "[developer]x[user]a"


CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"k":"v"}'}}


async def test_tool_turns_in_the_history() -> None:
    texts = set()
    for content in ({"content": None}, {"content": ""}, {}, {"content": []}):
        turn = {"role": "assistant", "tool_calls": [CALL], **content}
        result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
        texts.add(await prompt(CALLS, [user("q"), turn, result]))
    assert texts == {"[user]q[assistant](call lookup k=v)[tool]42[assistant]"}


@pytest.mark.parametrize("arguments", ["", None, "{}", {}, "[1]", "{broken", "[" * 100_000])
async def test_odd_arguments(engine: FakeEngine, arguments: Any) -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": None, "content": None}
    assert (await post(engine, [user("q"), turn, result], max_tokens=1)).status_code in (200, 400)


async def test_empty_turns_are_turns() -> None:
    text = await prompt(CALLS, [user("q"), {"role": "assistant", "content": ""}, {"role": "tool", "content": None}])
    assert text == "[user]q[assistant][tool][assistant]" and "None" not in text


async def test_content_parts_everywhere() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    roles = ["system", "user", "assistant", "tool"]
    text = await prompt(CALLS, [{"role": role, "content": parts} for role in roles])
    assert text == "[system]a\nb[user]a\nb[assistant]a\nb[tool]a\nb[assistant]"


CHATML_TURN = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


async def test_an_assistant_message_at_the_end_is_continued(engine: FakeEngine) -> None:
    messages = [user("q"), {"role": "assistant", "content": "The answer is "}]
    await post(engine, messages)
    await post(engine, messages, continue_final_message=True, add_generation_prompt=False)
    await post(engine, messages, continue_final_message=False)
    await post(engine, messages, add_generation_prompt=False)
    await post(engine, messages, add_generation_prompt=False, continue_final_message=False)
    texts = [engine.tokenizer.decode(request.prompt[1:], show_special=True) for request in engine.requests]
    assert texts == [
        CHATML_TURN + "The answer is ",
        CHATML_TURN + "The answer is ",
        CHATML_TURN + "The answer is <|im_end|>\n<|im_start|>assistant\n",
        CHATML_TURN + "The answer is ",
        CHATML_TURN + "The answer is <|im_end|>\n",
    ]


async def test_template_variables() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].content }}"
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"}
    assert await prompt(template, [user("q")], **fields) == "True high q"
    assert await prompt(template, [user("q")], reasoning_effort="none") == "False none q"


async def test_bos_stands_in_front_once() -> None:
    for template in ("<s>{{ messages[0].content }}", "{{ messages[0].content }}"):
        engine = FakeEngine(template=template)
        await post(engine, [user("q")])
        assert engine.requests[0].prompt == (engine.tokenizer.bos, ord("q"))


async def test_the_engine_knows_where_turns_begin() -> None:
    engine = FakeEngine()
    await post(engine, [system("s"), user("a"), {"role": "assistant", "content": "b"}, user("c")])
    (request,) = engine.requests
    starts = [at for at, token in enumerate(request.prompt) if token == IM_START]
    assert list(request.message_starts) == starts and len(starts) == 5
