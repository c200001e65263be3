"""Bodies that are not right, and bodies that are odd but fine: an answer in the envelope, never a 500."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from app.api.options import ApiLimits, ApiOptions
from tests.api.conftest import client_for
from tests.api.support import CHAT, HI, is_error
from tests.fakes.engine import FakeEngine

DEEP = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

NOT_JSON = {
    "empty": b"",
    "half an object": b"{",
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "not utf-8": b'{"messages":"\xff\xfe"}',
    "utf-16": json.dumps({"messages": HI}).encode("utf-16"),
    "deep": DEEP,
    "NaN": b'{"messages":[],"temperature":NaN}',
    "Infinity": b'{"messages":[],"temperature":-Infinity}',
    "lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "surrogate bytes": b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    "long number": b'{"messages":[],"seed":' + b"9" * 5000 + b"}",
    "trailing": b"{} {}",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
async def test_not_a_json_object(client: httpx.AsyncClient, body: bytes) -> None:
    is_error(await client.post(CHAT, content=body), 400, code="invalid_json")


async def test_half_a_surrogate_pair_is_named(client: httpx.AsyncClient) -> None:
    for content in (rb"\ud83d", rb"\ud83d and more", rb"\ude00", rb"\ud83d\u0041"):
        body = b'{"messages":[{"role":"user","content":"' + content + b'"}]}'
        error = is_error(await client.post(CHAT, content=body), 400, code="invalid_json")
        assert "surrogate" in error["message"], content


WRONG: list[tuple[str, Any]] = [
    ("messages", "hi"),
    ("messages", []),
    ("messages", None),
    ("messages[0]", [5]),
    ("messages[0].role", [{"content": "x"}]),
    ("messages[0].role", [{"role": "narrator", "content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": None}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "text"}]}]),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 1.1),
    ("top_p", -1),
    ("min_p", 2),
    ("max_tokens", "5"),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_completion_tokens", -1),
    ("n_predict", -2),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", True),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", ["a" * 2000]),
    ("stop[1]", ["a", 5]),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 111),
    ("n", 1.5),
    ("seed", "42"),
    ("seed", 2**63),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", 5),
    ("logit_bias", [["long " * 60, 5]]),
    ("logit_bias", [[5, 1]] * 5000),
    ("logit_bias", {str(i): 1 for i in range(5000)}),
    ("dry_sequence_breakers", ["x"] * 17),
    ("dry_sequence_breakers", ["x" * 65]),
    ("dry_sequence_breakers", [5] * 1000),
    ("messages", [{"role": "user", "content": ""}] * 5000),
    ("messages[0].content", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]),
    ("tools", [{"type": "function", "function": {"name": "a"}}] * 2000),
    ("guided_choice", [str(i) for i in range(20000)]),
    ("repeat_penalty", 1e-45),
    ("repetition_penalty", 0.005),
    ("json_schema", {"type": "integer", "minimum": 10**30}),
    ("json_schema", {"enum": [10**400]}),
    ("json_schema", {"type": "array", "maxItems": 2**65}),
    ("logprobs", 5),
    ("top_logprobs", 3),
    ("tools", [{"type": "function", "function": {"name": 5}}]),
    ("tools", {}),
    ("functions", [{"name": "f"}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("response_format", {}),
    ("grammar", "root ::= x"),
    ("json_schema", []),
    ("samplers", ["top_p", "top_k"]),
    ("samplers", ["nonsense"]),
    ("samplers", "kz"),
    ("mirostat", 1),
    ("dynatemp_range", 0.5),
    ("lora", [{"id": 0, "scale": 1}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("chat_template_kwargs", "x"),
    ("chat_template_kwargs.messages", {"messages": []}),
    ("model", 5),
    ("continue_final_message", True),
]


def names(given: str, wanted: str) -> bool:
    """Whether the reported name is the field, or something inside of it."""
    return given == wanted or given.startswith((f"{wanted}.", f"{wanted}["))


@pytest.mark.parametrize(("param", "value"), WRONG, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("streamed", [False, True])
async def test_wrong_fields_are_named(
    client: httpx.AsyncClient, engine: FakeEngine, param: str, value: Any, streamed: bool
) -> None:
    field = param.partition("[")[0].partition(".")[0]
    response = await client.post(CHAT, json={"messages": HI, "stream": streamed, field: value})
    error = response.json()["error"]
    is_error(response, 400, param=error["param"])
    assert names(error["param"], param), error
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize("top_logprobs", [-1, 21, 1.5, "3"])
async def test_wrong_top_logprobs(client: httpx.AsyncClient, top_logprobs: Any) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": top_logprobs}
    is_error(await client.post(CHAT, json=body), 400, param="top_logprobs")


async def test_numbers_too_large_for_a_float(client: httpx.AsyncClient) -> None:
    body = json.dumps({"messages": HI})[:-1] + ',"temperature":1e999}'
    is_error(await client.post(CHAT, content=body), 400, param="temperature")


FINE: dict[str, dict[str, Any]] = {
    "unknown": {"foo": 1, "service_tier": "auto", "metadata": {"a": 1}, "store": True, "user": 5},
    "nulls": dict.fromkeys(
        "temperature top_p stop seed tools response_format user logit_bias n max_tokens stream stream_options "
        "tool_choice model logprobs top_logprobs parallel_tool_calls chat_template_kwargs grammar".split()
    ),
    "neutral": {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "grammar": "", "id_slot": -1},
    "whole floats": {"max_tokens": 5.0, "n": 1.0},
    "whole numbers": {"temperature": 1, "top_p": 0},
    "any model": {"model": "gpt-4o"},
    "random seed": {"seed": -1},
    "pairs": {"logit_bias": [[5, False], ["ab", 1.5]]},
    "huge": {"max_tokens": 10**9},
}


@pytest.mark.parametrize("fields", FINE.values(), ids=FINE)
async def test_odd_but_fine(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post(CHAT, json={"messages": HI, **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", None, "nonsense"])
async def test_any_content_type(client: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = await client.post(CHAT, content=json.dumps({"messages": HI}), headers=headers)
    assert response.status_code == 200


async def test_byte_order_mark_and_repeated_keys(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = '\ufeff{"max_tokens":9,"messages":' + json.dumps(HI) + ',"max_tokens":2}'
    assert (await client.post(CHAT, content=body.encode())).status_code == 200
    assert engine.requests[0].max_tokens == 2


async def test_nul_is_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "a\0b"}], "stop": ["\0"]}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert 0 in engine.requests[0].prompt


@pytest.mark.parametrize("announced", [True, False])
async def test_large_bodies(engine: FakeEngine, announced: bool) -> None:
    options = ApiOptions(limits=ApiLimits(body_bytes=1000))
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()

    async def pieces() -> Any:
        yield body[:100]
        yield body[100:]

    async with client_for(engine, options) as client:
        response = await client.post(CHAT, content=body if announced else pieces())
        is_error(response, 413, code="body_too_large")
        assert "1000" in response.text
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 200


async def test_wrong_places(client: httpx.AsyncClient) -> None:
    response = await client.get(CHAT)
    is_error(response, 405)
    assert response.headers["allow"] == "POST"
    for path in ("/v1/nope", "/v1/chat", "/nope"):
        is_error(await client.post(path, json={}), 404)
        is_error(await client.get(path), 404)


async def test_unknown_models(engine: FakeEngine) -> None:
    async with client_for(engine, ApiOptions(any_model=False)) as client:
        is_error(await client.post(CHAT, json={"messages": HI, "model": "x"}), 404, "model", "model_not_found")
        for body in ({"model": "fake"}, {"model": "fake-model"}, {}):
            assert (await client.post(CHAT, json={"messages": HI, **body})).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_too_long_prompts(engine: FakeEngine, streamed: bool) -> None:
    async with client_for(engine) as client:
        message = [{"role": "user", "content": "x" * 5000}]
        response = await client.post(CHAT, json={"messages": message, "stream": streamed})
    error = is_error(response, 400, "messages", "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    assert error["n_ctx"] == 4096 and error["n_prompt_tokens"] > 5000
    assert "4096" in error["message"] and str(error["n_prompt_tokens"]) in error["message"]


@pytest.mark.parametrize("can_tell", [True, False])
async def test_far_too_long_prompts_are_not_tokenized_whole(engine: FakeEngine, can_tell: bool) -> None:
    text, encode, longest = "x" * 100_000, engine.tokenizer.encode, 0

    def watched(text: str, **options: bool) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text, **options)

    engine.tokenizer.encode = watched
    if not can_tell:
        engine.tokenizer.fewest_tokens = lambda text: 0
    async with client_for(engine) as client:
        for path, param, body in (
            (CHAT, "messages", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", "prompt", {"prompt": text}),
            ("/v1/embeddings", "input", {"input": text}),
            ("/infill", "input_prefix", {"input_prefix": text, "input_suffix": text}),
        ):
            error = is_error(await client.post(path, json=body), 400, param, "context_length_exceeded")
            assert "at least" in error["message"] and "4096" in error["message"]
            assert 4096 < error["n_prompt_tokens"] < 200_000
    assert longest < (1 if can_tell else 40_000)


@pytest.mark.parametrize("path", ["/v1/completions", "/infill", CHAT])
async def test_the_engine_prepares_off_the_event_loop(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    given = {"messages": HI, "prompt": "x", "input_prefix": "a", "input_suffix": "b"}
    body = {**given, "dry_multiplier": 0.5, "dry_sequence_breakers": ["x" * 64] * 16, "max_tokens": 1}
    assert (await client.post(path, json=body)).status_code == 200
    (prepared,) = engine.prepared
    assert prepared[0].dry_sequence_breakers == ("x" * 64,) * 16
    assert prepared[1] is not threading.current_thread()


@pytest.mark.parametrize("path", ["/detokenize", "/tokenize", "/v1/completions"])
async def test_too_many_tokens_are_refused_by_one_line(client: httpx.AsyncClient, path: str) -> None:
    field = {"/detokenize": "tokens", "/tokenize": "content"}.get(path, "prompt")
    for content in (b"5", b"-5"):
        body = b'{"%s":[%s]}' % (field.encode(), b",".join([content] * ((1 << 20) + 1)))
        response = await client.post(path, content=body)
        error = response.json()["error"]
        is_error(response, 400, param=error["param"])
        assert names(error["param"], field) and len(response.content) < 1000


async def test_many_tokens_are_answered_in_order(client: httpx.AsyncClient) -> None:
    text = "abc" * 5000
    tokens = (await client.post("/tokenize", json={"content": text})).json()["tokens"]
    assert bytes(tokens).decode() == text
    assert (await client.post("/tokenize", json={"content": ""})).json() == {"tokens": []}
    pieces = (await client.post("/tokenize", json={"content": text, "with_pieces": True})).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == text
    assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"content": text}
