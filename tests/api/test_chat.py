"""Chat completions: whole and streamed."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from tests.api.support import CHAT, HI, is_error, joined, stream
from tests.fakes.engine import FakeEngine

ANSWER = "Hello from the fake engine."


async def test_whole_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cached_tokens = 3
    response = await client.post(CHAT, json={"messages": HI, "model": "fake"})
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    n_prompt = len(engine.requests[0].prompt)
    assert body["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": len(ANSWER),
        "total_tokens": n_prompt + len(ANSWER),
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["timings"]["predicted_n"] == len(ANSWER) and body["timings"]["cache_n"] == 3


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
async def test_stream_shape(client: httpx.AsyncClient, options: dict[str, object]) -> None:
    *events, done = await stream(client, CHAT, {"messages": HI, **options})
    assert done == "[DONE]"
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(len(e["choices"]) == 1 and "usage" not in e for e in events)
    assert all("role" not in e["choices"][0]["delta"] for e in events[1:])
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1]["choices"][0]["delta"] == {}
    assert joined(events) == ANSWER


async def test_usage_chunk_only_when_asked(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "stream_options": {"include_usage": True}}
    *events, last, done = await stream(client, CHAT, body)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert all(e["usage"] is None for e in events)
    whole = (await client.post(CHAT, json={"messages": HI, "stream_options": {"include_usage": True}})).json()
    assert last["usage"] == whole["usage"]


async def test_first_comes_a_comment(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"messages": HI, "stream": True})
    assert response.text.startswith(":")
    assert response.headers["x-accel-buffering"] == "no" and response.headers["cache-control"] == "no-cache"


async def test_text_is_sent_as_it_is(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = 'quote " backslash \\ newline \n tab \t nul \0 é 漢 🙂 \u2028 </script>'
    engine.reply = lambda request: text
    whole = (await client.post(CHAT, json={"messages": HI})).json()
    assert whole["choices"][0]["message"]["content"] == text
    assert joined(await stream(client, CHAT, {"messages": HI})) == text


async def test_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "messages": HI,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.01,
        "seed": 42,
        "stop": ["xyz"],
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "logit_bias": {"65": -100, "66": False},
        "cache_prompt": False,
    }
    assert (await client.post(CHAT, json=body)).status_code == 200
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.01)
    assert sampling.seed == 42 and sampling.n_logprobs is None
    assert sampling.logit_bias == {65: -100.0, 66: float("-inf")}
    assert request.stop == ("xyz",) and request.max_tokens == 6 and not request.cache_prompt


@pytest.mark.parametrize("streamed", [False, True])
async def test_choices_differ_and_come_back_the_same(client: httpx.AsyncClient, streamed: bool) -> None:
    body = {"messages": HI, "n": 3, "temperature": 1, "seed": 5}

    async def texts() -> list[str]:
        if streamed:
            events = await stream(client, CHAT, body)
            choices = [choice for event in events[:-1] for choice in event["choices"]]
            for index in range(3):
                own = [choice for choice in choices if choice["index"] == index]
                assert sum("role" in choice["delta"] for choice in own) == 1
                assert sum(choice["finish_reason"] is not None for choice in own) == 1
            return [joined(events, index) for index in range(3)]
        answer = (await client.post(CHAT, json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        return [choice["message"]["content"] for choice in answer["choices"]]

    first = await texts()
    assert len(set(first)) == 3
    assert await texts() == first


async def test_usage_counts_a_shared_prompt_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    usage = (await client.post(CHAT, json={"messages": HI, "n": 3, "max_tokens": 4})).json()["usage"]
    assert usage["prompt_tokens"] == len(engine.requests[0].prompt)
    assert usage["completion_tokens"] == 12


async def test_a_full_queue_admits_no_choice(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.capacity = 2
    response = await client.post(CHAT, json={"messages": HI, "n": 3, "stream": True})
    is_error(response, 429, code="queue_full")
    assert response.headers["retry-after"] == "3"
    assert len(engine.aborted_ids) == 2


async def test_stop_strings(client: httpx.AsyncClient) -> None:
    choice = (await client.post(CHAT, json={"messages": HI, "stop": " fake"})).json()["choices"][0]
    assert choice["message"]["content"] == "Hello from the" and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
async def test_length(client: httpx.AsyncClient, name: str) -> None:
    for n in (0, 1, 5):
        body = (await client.post(CHAT, json={"messages": HI, name: n})).json()
        assert body["choices"][0]["message"]["content"] == ANSWER[:n]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == n


async def test_errors_inside_a_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_with, engine.fail_after = RuntimeError("secret words"), 3
    events = await stream(client, CHAT, {"messages": HI})
    assert joined(events[:-1]) == ANSWER[:3]
    assert events[-1]["error"]["type"] == "server_error" and "secret" not in str(events[-1])
    assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])


@pytest.mark.parametrize("samplers", [["top_k", "min_p", "temperature"], "kmt"])
async def test_samplers_that_are_not_named_are_off(
    client: httpx.AsyncClient, engine: FakeEngine, samplers: Any
) -> None:
    body = {"messages": HI, "samplers": samplers, "top_k": 5, "top_p": 0.5, "temperature": 0.3, "repeat_penalty": 2}
    assert (await client.post(CHAT, json=body)).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.temperature) == (5, 0.05, 0.3)
    assert (sampling.top_p, sampling.typical_p, sampling.repeat_penalty, sampling.xtc_probability) == (1, 1, 1, 0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_line_in_the_log(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, streamed: bool) -> None:
    caplog.set_level(logging.INFO)
    await client.post(CHAT, json={"messages": HI, "n": 2, "max_tokens": 3, "stream": streamed})
    (line,) = [record for record in caplog.records if record.message == "answered"]
    assert vars(line)["out"] == 6 and vars(line)["finish"] == "length,length"
