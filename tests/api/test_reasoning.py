"""Thoughts are told apart from what is meant for the reader."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.options import ApiOptions
from tests.api.conftest import client_for
from tests.api.support import CHAT, HI, joined, stream
from tests.fakes.engine import CHATML, FakeEngine

#: A template of a family that thinks, and one that opens the thought itself.
THINKS = CHATML + "{# <think> #}"
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

REPLIES = {THINKS: "<think>\nmm 漢\n</think>\n\nYes.", OPENS: "mm 漢\n</think>\n\nYes."}


def engine_for(template: str) -> FakeEngine:
    return FakeEngine(template=template, reply=lambda request: REPLIES[template])


@pytest.mark.parametrize("template", REPLIES, ids=["answer opens", "template opens"])
async def test_thoughts_have_their_own_field(template: str) -> None:
    async with client_for(engine_for(template)) as client:
        body = (await client.post(CHAT, json={"messages": HI})).json()
        events = await stream(client, CHAT, {"messages": HI, "stream_options": {"include_usage": True}})
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == joined(events, name="reasoning_content") == "mm 漢"
    assert message["content"] == joined(events) == "Yes."
    details = body["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < body["usage"]["completion_tokens"]
    assert events[-2]["usage"]["completion_tokens_details"] == details
    assert body["usage"]["completion_tokens"] == len(REPLIES[template].encode())


@pytest.mark.parametrize("template", REPLIES, ids=["answer opens", "template opens"])
async def test_thoughts_can_stay_in_the_content(template: str) -> None:
    async with client_for(engine_for(template)) as client:
        message = (await client.post(CHAT, json={"messages": HI, "reasoning_format": "none"})).json()
    assert message["choices"][0]["message"]["content"] == REPLIES[template]
    async with client_for(engine_for(template), ApiOptions(reasoning_format="none")) as client:
        events = await stream(client, CHAT, {"messages": HI})
    assert joined(events) == REPLIES[template]


async def test_cut_in_the_middle_of_a_thought() -> None:
    async with client_for(engine_for(THINKS)) as client:
        body = {"messages": HI, "max_tokens": 10}
        choice = (await client.post(CHAT, json=body)).json()["choices"][0]
        events = await stream(client, CHAT, body)
    assert choice["message"]["reasoning_content"] == joined(events, name="reasoning_content") == "mm"
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"


async def test_a_thought_that_the_client_began() -> None:
    engine = FakeEngine(template=THINKS, reply=lambda request: "more\n</think>\nYes.")
    last: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "First, "}
    async with client_for(engine) as client:
        message = (await client.post(CHAT, json={"messages": [*HI, last]})).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "more" and message["content"] == "Yes."


@pytest.mark.parametrize("n", [1, 2])
async def test_log_probabilities_are_complete(n: int) -> None:
    async with client_for(engine_for(THINKS)) as client:
        body = {"messages": HI, "logprobs": True, "return_tokens": True, "n": n}
        whole = (await client.post(CHAT, json=body)).json()
        events = await stream(client, CHAT, body)
    for index in range(n):
        choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert entries == whole["choices"][index]["logprobs"]["content"]
        tokens = [token for choice in choices for token in choice.get("tokens", ())]
        assert tokens == whole["choices"][index]["tokens"] == [*REPLIES[THINKS].encode()]


async def test_models_without_thoughts_keep_their_tags() -> None:
    engine = FakeEngine(reply=lambda request: "<think>a</think>b")
    async with client_for(engine) as client:
        message = (await client.post(CHAT, json={"messages": HI})).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b" and "reasoning_content" not in message
