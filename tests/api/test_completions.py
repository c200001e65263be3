"""Text completions: prompts of every kind, echo, log probabilities, holes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.support import COMPLETIONS, is_error, stream
from tests.fakes.engine import BOS, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, FakeEngine

ANSWER = "Hello from the fake engine."


def prompt_reply(request: Any) -> str:
    return "to " + bytes(token for token in request.prompt if token < 256).decode()


def completion_text(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def test_whole_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = (await client.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 5})).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 5
    assert engine.requests[0].prompt == (BOS, ord("a"), ord("b"))


async def test_sixteen_tokens_unless_told_otherwise(client: httpx.AsyncClient) -> None:
    assert (await client.post(COMPLETIONS, json={"prompt": "a"})).json()["choices"][0]["text"] == ANSWER[:16]
    unlimited = {"prompt": "a", "n_predict": -1}
    assert (await client.post(COMPLETIONS, json=unlimited)).json()["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("asked", [False, True])
async def test_stream_shape(client: httpx.AsyncClient, asked: bool) -> None:
    body = {"prompt": "a", "max_tokens": 5, "stream_options": {"include_usage": asked}}
    *events, done = await stream(client, COMPLETIONS, body)
    assert done == "[DONE]"
    if asked:
        last = events.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
        assert all(event["usage"] is None for event in events)
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert all(len(event["choices"]) == 1 for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["length"]
    assert completion_text(events) == "Hello"


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_prompts(client: httpx.AsyncClient, engine: FakeEngine, streamed: bool) -> None:
    engine.reply = lambda request: f"{prompt_reply(request)} {request.sampling.seed}"
    body = {"prompt": ["a", [98, 99]], "n": 2, "seed": 5, "max_tokens": 20}
    if streamed:
        events = await stream(client, COMPLETIONS, body)
        texts = [completion_text(events, index) for index in range(4)]
    else:
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 2 + 2
        texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["to a 5", "to a 6", "to bc 5", "to bc 6"]
    assert len({request.id for request in engine.requests}) == 4


async def test_token_ids_are_taken_as_they_are(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for prompt in ([65, 66], [[65, 66]]):
        assert (await client.post(COMPLETIONS, json={"prompt": prompt})).status_code == 200
    assert [request.prompt for request in engine.requests] == [(65, 66), (65, 66)]


@pytest.mark.parametrize("n_more", [0, 1])
@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_with_log_probabilities(client: httpx.AsyncClient, n_more: int, streamed: bool) -> None:
    body = {"prompt": "A é", "max_tokens": n_more, "echo": True, "logprobs": 1, "temperature": 0}
    if streamed:
        first, last, done = await stream(client, COMPLETIONS, body)
        assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
        choice = first["choices"][0]
    else:
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert answer["usage"]["completion_tokens"] == n_more
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert choice["text"] == "A é" + "H" * n_more
    assert logprobs["tokens"] == ["<s>", "A", " ", "bytes:\\xc3", "bytes:\\xa9", *"H" * n_more]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (4 + n_more)
    assert logprobs["text_offset"] == [0, 0, 1, 2, 2, 3][: 5 + n_more]
    assert logprobs["top_logprobs"][:2] == [None, {"A": -0.5}]
    assert len(logprobs["top_logprobs"]) == 5 + n_more


async def test_echo_of_token_ids_hides_nothing(client: httpx.AsyncClient) -> None:
    body = {"prompt": [BOS, 65], "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert choice["text"] == "<s>A"
    assert choice["logprobs"]["text_offset"] == [0, 3]


async def test_echo_alone(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "echo": True}
    assert (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"] == "abHe"
    assert completion_text(await stream(client, COMPLETIONS, body)) == "abHe"
    assert not any(request.prompt_logprobs for request in engine.requests)


@pytest.mark.parametrize("n_top", [0, 1, 5])
async def test_legacy_log_probabilities(client: httpx.AsyncClient, engine: FakeEngine, n_top: int) -> None:
    engine.reply = lambda request: "a🙂b"
    body = {"prompt": "p", "logprobs": n_top}
    logprobs = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in logprobs.values()} == {6}
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in top and len(top) == max(1, n_top)
        assert list(top.values()) == sorted(top.values(), reverse=True)
    events = await stream(client, COMPLETIONS, body)
    parts = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
    for name, whole in logprobs.items():
        assert [value for part in parts for value in part[name]] == whole


async def test_tokens_of_each_choice(client: httpx.AsyncClient) -> None:
    body = {"prompt": "p", "return_tokens": True, "max_tokens": 2}
    assert (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["tokens"] == [72, 101]
    events = await stream(client, COMPLETIONS, body)
    assert [token for event in events[:-2] for token in event["choices"][0]["tokens"]] == [72, 101]


async def test_suffix(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.post(COMPLETIONS, json={"prompt": "a<s>", "suffix": "b"})).status_code == 200
    assert engine.requests[0].prompt == (BOS, FIM_PREFIX, *b"a<s>", FIM_SUFFIX, *b"b", FIM_MIDDLE)
    engine.tokenizer.fim = type(engine.tokenizer.fim)(prefix=None, suffix=None, middle=None)
    is_error(await client.post(COMPLETIONS, json={"prompt": "a", "suffix": "b"}), 400, "suffix")
    assert (await client.post(COMPLETIONS, json={"prompt": "a", "suffix": ""})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": ["a", [999_999]]}, "prompt[1]"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "n_probs": 21}, "n_probs"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": ["a", "b"], "suffix": "c"}, "suffix"),
        ({"prompt": "a", "suffix": "c", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": 5}, "suffix"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": "a", "grammar": "x"}, "grammar"),
    ],
)
async def test_wrong_fields_are_named(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    is_error(await client.post(COMPLETIONS, json=body), 400, param)


@pytest.mark.parametrize("n", [4094, 4095, 4096, 9000])
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_context_is_a_hard_edge(client: httpx.AsyncClient, n: int, streamed: bool) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": [65] * n, "max_tokens": 64, "stream": streamed})
    if n < 4096:
        assert response.status_code == 200
        if not streamed:
            assert response.json()["usage"]["completion_tokens"] == 4096 - n
            assert response.json()["choices"][0]["finish_reason"] == "length"
    else:
        error = is_error(response, 400, "prompt", "context_length_exceeded")
        assert str(n) in error["message"] and "4096" in error["message"]


async def test_infill(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input_prefix": "def ", "input_suffix": "():", "prompt": "f", "n_predict": 3, "return_tokens": True}
    answer = (await client.post("/infill", json=body)).json()
    assert engine.requests[0].prompt == (BOS, FIM_PREFIX, *b"def ", FIM_SUFFIX, *b"():", FIM_MIDDLE, *b"f")
    assert answer["content"] == "Hel" and answer["tokens"] == [*b"Hel"] and answer["stop"] is True
    assert answer["stop_type"] == "limit" and answer["tokens_predicted"] == 3
    events = await stream(client, "/infill", body)
    assert "".join(event["content"] for event in events) == "Hel"
    assert [event["stop"] for event in events] == [False] * 3 + [True]
    assert events[-1]["timings"]["predicted_n"] == 3


async def test_infill_with_other_files(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    extra = [{"filename": "a.py", "text": "A"}, {"text": "B"}]
    body = {"input_prefix": "p", "input_suffix": "s", "input_extra": extra, "stop": " from"}
    answer = (await client.post("/infill", json=body)).json()
    assert answer["content"] == "Hello" and answer["stop_type"] == "word" and answer["stopping_word"] == " from"
    text = engine.tokenizer.decode(engine.requests[0].prompt, show_special=True)
    before, _, rest = text.partition("<|fim_prefix|>")
    assert before.index("a.py") < before.index("A") < before.index("B")
    assert rest == "p<|fim_suffix|>s<|fim_middle|>"
    is_error(await client.post("/infill", json={"input_prefix": "p"}), 400, "input_suffix")


async def test_what_an_editor_asks(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The request of the llama.vscode extension."""
    body = {
        "id_slot": -1,
        "input_prefix": "def f(",
        "input_suffix": "",
        "input_extra": [],
        "prompt": "",
        "n_predict": 8,
        "n_indent": 0,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content"],
    }
    response = await client.post("/infill", json=body)
    assert response.status_code == 200 and response.json()["content"] == "Hello fr"
    assert engine.requests[0].sampling.top_p == 0.99 and engine.requests[0].sampling.min_p == 0.2
