"""Log probabilities of chat answers, and what else is told per token."""

from __future__ import annotations

import math

import httpx
import pytest

from app.api.logprobs import FLOOR, finite
from tests.api.support import CHAT, HI, joined, stream
from tests.fakes.engine import FakeEngine


@pytest.mark.parametrize("n_top", [None, 0, 3, 20])
async def test_shape(client: httpx.AsyncClient, engine: FakeEngine, n_top: int | None) -> None:
    engine.reply = lambda request: "a🙂b"
    body = {"messages": HI, "logprobs": True, "top_logprobs": n_top}
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"] == "a🙂b"
    for entry in content:
        assert {"token", "logprob", "bytes", "top_logprobs"} <= set(entry)
        assert len(entry["top_logprobs"]) == (n_top or 0)
        logprobs = [top["logprob"] for top in entry["top_logprobs"]]
        assert logprobs == sorted(logprobs, reverse=True) and all(value <= 0 for value in logprobs)
        if n_top:
            assert entry["bytes"] in [top["bytes"] for top in entry["top_logprobs"]]
    events = await stream(client, CHAT, body)
    parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [entry for part in parts if part for entry in part["content"]] == content
    assert joined(events) == "a🙂b"


async def test_none_unless_asked(client: httpx.AsyncClient) -> None:
    choice = (await client.post(CHAT, json={"messages": HI, "logprobs": False})).json()["choices"][0]
    assert choice["logprobs"] is None and "tokens" not in choice


def test_infinities_become_finite() -> None:
    assert finite(-math.inf) == FLOOR and finite(None) == FLOOR and finite(1e-9) == 0.0 and finite(-2.5) == -2.5
    assert math.copysign(1, finite(-0.0)) == 1


async def test_tokens_of_each_choice(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "return_tokens": True, "max_tokens": 3, "n": 2}
    answer = (await client.post(CHAT, json=body)).json()
    assert [choice["tokens"] for choice in answer["choices"]] == [[*b"Hel"], [*b"Hel"]]
    events = await stream(client, CHAT, body)
    for index in range(2):
        choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert [token for choice in choices for token in choice.get("tokens", [])] == [*b"Hel"]


async def test_progress_of_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    events = await stream(client, CHAT, {"messages": HI, "return_progress": True})
    told = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    n_prompt = len(engine.requests[0].prompt)
    assert [part["processed"] for part in told] == [n_prompt // 2, n_prompt]
    assert all(part["total"] == n_prompt and set(part) == {"total", "cache", "processed", "time_ms"} for part in told)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_timings_per_token(client: httpx.AsyncClient) -> None:
    events = await stream(client, CHAT, {"messages": HI, "timings_per_token": True, "max_tokens": 3})
    texts = [event for event in events[:-2] if event["choices"][0]["delta"].get("content")]
    assert [event["timings"]["predicted_n"] for event in texts] == [1, 2, 3]
    assert events[-2]["timings"]["predicted_n"] == 3
