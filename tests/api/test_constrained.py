"""Answers that must have a form have it, every time, and what cannot be held to is refused before anything is sent."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from app.api.app import create_app
from app.api.options import ApiOptions
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from tests.api.conftest import client_for
from tests.api.support import ANY_PARAM, CHAT, COMPLETIONS, is_error, joined, stream
from tests.fakes.engine import FakeEngine
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.schemas import random_schema
from tests.fakes.serving import open_engine

MESSAGES = [{"role": "user", "content": "Write a poem"}]
HOT = {"messages": MESSAGES, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 1500}
OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
NODE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "v": {"$ref": "#/$defs/C"},
                "kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        },
        "C": {"enum": ["r", "g"]},
    },
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny_llama(tmp_path_factory.mktemp("form") / "tiny.gguf", TinyLlama(GGMLType.F16))
    device = NumpyDevice("CPU")
    engine = open_engine(path, [device], ctx_size=16384, n_slots=8, max_queue=512)
    yield engine
    engine.close()
    engine.check_integrity()
    device.close()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine, ApiOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
        yield client


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}


async def choice(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json={**HOT, "seed": 7, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def whole(client: httpx.AsyncClient, **fields: Any) -> str:
    answer = await choice(client, **fields)
    assert answer["finish_reason"] == "stop", answer
    return answer["message"]["content"]


async def check_schema(client: httpx.AsyncClient, schema: Any, seed: int = 7) -> Any:
    text = await whole(client, response_format=schema_format(schema), seed=seed)
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


async def check_random(client: httpx.AsyncClient, seeds: range) -> None:
    await asyncio.gather(*(check_schema(client, random_schema(seed), seed) for seed in seeds))


async def test_random_schemas(client: httpx.AsyncClient) -> None:
    await check_random(client, range(24))


@pytest.mark.slow
async def test_300_random_schemas(client: httpx.AsyncClient) -> None:
    await check_random(client, range(24, 324))


REFERENCES: dict[str, Any] = {
    "recursion": NODE,
    "definitions": {"$ref": "#/definitions/A", "definitions": {"A": {"type": "boolean"}}},
    "into properties": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "boolean"}]}, "b": {"$ref": "#/properties/a/anyOf/0"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "itself": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "additionalProperties": False,
    },
    "escaped": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
}


@pytest.mark.parametrize("name", REFERENCES)
async def test_references(client: httpx.AsyncClient, name: str) -> None:
    await check_schema(client, REFERENCES[name])


UNION = {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 500}, {"const": "p"}]}
NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 1, "maximum": 99}, r"[1-9]\d?"),
    ({"type": "integer", "minimum": -123, "maximum": 42}, r"-?[1-9]\d{0,2}|0"),
    ({"type": "integer", "minimum": 10, "maximum": 10}, "10"),
    ({"type": "integer", "minimum": 0.5, "maximum": 1.5}, "1"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, "4"),
    ({"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 5}, r"0|[1-9]?[05]"),
    ({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, r"\d|null"),
    ({"const": 1.0}, r"1(\.0)?"),
    ({"type": "boolean"}, "true|false"),
    (UNION, r'\d+|"p"'),
    ({"type": "string", "format": "uuid"}, r'"[0-9a-f-]{36}"'),
    ({"type": "string", "pattern": r"^hi there\!$"}, '"hi there!"'),
    ({"type": "string", "pattern": r"^(a*)*b$", "maxLength": 40}, r'"a*b"'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "pattern"), NUMBERS, ids=[json.dumps(schema)[:40] for schema, _ in NUMBERS])
async def test_values(client: httpx.AsyncClient, schema: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        text = await whole(client, response_format=schema_format(schema), seed=seed)
        assert re.fullmatch(pattern, text, re.IGNORECASE), text
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


async def test_numbers_can_be_read_by_everyone(client: httpx.AsyncClient) -> None:
    for seed in range(6):
        text = await whole(client, response_format=schema_format({"type": "number"}), seed=seed)
        assert re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text) and abs(json.loads(text)) <= 1e15


async def test_properties_of_other_names_only_where_allowed(client: httpx.AsyncClient) -> None:
    for extra in ({"type": "null"}, False):
        schema = {**OBJECT, "additionalProperties": extra, "maxProperties": 3}
        if extra is False:
            del schema["maxProperties"]
        await check_schema(client, schema)


#: What is refused, and a word of the message that names the reason.
REFUSED: list[tuple[Any, str]] = [
    ({"enum": []}, "anyOf is empty"),
    (False, "false"),
    ({"not": {}}, "not"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"type": "objct"}, "objct"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "look-ahead"),
    ({**OBJECT, "required": ["b"]}, "'b'"),
    ({"$ref": "#/$defs/nothing"}, "#/$defs/nothing"),
    ({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}, "$ref"),
    ({"$ref": "http://x.test/s.json"}, "http://x.test/s.json"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "null"}}, "contains"),
    ({"if": {"type": "null"}, "then": {}}, "if"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "string", "format": "nothing-known"}, "nothing-known"),
    ({"type": "string", "not": {}, "x-guidance": {"lenient": True}}, "x-guidance"),
    ({"type": "string", "pattern": "(" * 50_000}, "pattern"),
]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=[word for _, word in REFUSED])
async def test_refused_before_headers(client: httpx.AsyncClient, schema: Any, word: str, streamed: bool) -> None:
    started_s = time.monotonic()
    body = {**HOT, "response_format": schema_format(schema), "stream": streamed}
    error = is_error(await client.post(CHAT, json=body), 400, "response_format")
    assert word in error["message"] or word == "pattern", error
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'},
        {"grammar": "root ::= ("},
        {"grammar": 'other ::= "a"'},
        {"grammar": 'root ::= root "a"'},
        {"guided_regex": "("},
        {"guided_choice": []},
        {"guided_json": "{"},
        {"guided_grammar": "start: %what"},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
    ],
    ids=json.dumps,
)
async def test_refused(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    is_error(await client.post(CHAT, json={**HOT, **fields}), 400, ANY_PARAM)


@pytest.mark.parametrize("keyword", ["items", "anyOf"])
@pytest.mark.parametrize("depth", [50, 1000, 50_000])
async def test_depth(client: httpx.AsyncClient, keyword: str, depth: int) -> None:
    opening, closing = ('{"type":"array","maxItems":0,"items":', "}") if keyword == "items" else ('{"anyOf":[', "]}")
    schema = opening * depth + '{"type":"null"}' + closing * depth
    body = json.dumps({**HOT, "response_format": schema_format(None)}).replace('"schema": null', f'"schema": {schema}')
    started_s = time.monotonic()
    response = await client.post(CHAT, content=body)
    assert time.monotonic() - started_s < 2
    if depth == 50:
        assert response.status_code == 200, response.text
    else:
        is_error(response, 400, ANY_PARAM)


async def test_a_runaway_recursion_ends_by_length(client: httpx.AsyncClient) -> None:
    schema = {"type": "array", "items": {"$ref": "#"}}
    bias = [["[", 100]]
    answer = await choice(client, response_format=schema_format(schema), logit_bias=bias, max_tokens=200, temperature=0)
    assert answer["finish_reason"] == "length" and answer["message"]["content"].startswith("[[[[")


async def test_json_object(client: httpx.AsyncClient) -> None:
    body = {"response_format": {"type": "json_object"}, "logit_bias": [["}", 8]], "temperature": 0.8}
    text = await whole(client, **body)
    assert isinstance(json.loads(text), dict)
    events = await stream(client, CHAT, {**HOT, "seed": 7, **body})
    assert joined(events) == text
    assert (await choice(client, response_format={"type": "text"}, max_tokens=4))["message"]["content"] is not None


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": 'root ::= item ("," item)? "!"\nitem ::= [a-c]{2} | "näh"'}, "([a-c]{2}|näh)(,([a-c]{2}|näh))?!"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 7}}, "[5-7]"),
        ({"guided_regex": r"\d{3}-\w{2}"}, "[0-9]{3}-[A-Za-z0-9_]{2}"),
        ({"guided_choice": ["yes", 'a "b"\n', "漢字"]}, 'yes|a "b"\n|漢字'),
        ({"guided_json": {"const": "x"}}, '"x"'),
        ({"guided_json": '{"const": "x"}'}, '"x"'),
        ({"guided_grammar": 'start: "on" | "off"'}, "on|off"),
        ({"structured_outputs": {"choice": ["on", "off"]}}, "on|off"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"regex": "a{3}"}}, "aaa"),
    ],
    ids=str,
)
async def test_other_dialects(client: httpx.AsyncClient, fields: dict[str, Any], pattern: str) -> None:
    text = await whole(client, **fields)
    assert re.fullmatch(pattern, text), text
    body = {"prompt": "A", "max_tokens": 200, "temperature": 1.2, "seed": 3, **fields}
    completion = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert re.fullmatch(pattern, completion["text"]), completion


async def test_gpt_oss_answers_in_its_final_message() -> None:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis #}"
    )
    engine = FakeEngine(template=template, reply=lambda request: '<|channel|>final<|message|>{"a": true}')
    async with client_for(engine) as client:
        body = {"messages": MESSAGES, "response_format": schema_format(OBJECT)}
        for reasoning_format in ("auto", "none"):
            answer = await client.post(CHAT, json={**body, "reasoning_format": reasoning_format})
            assert answer.json()["choices"][0]["message"]["content"] == '{"a": true}'
        is_error(await client.post(CHAT, json={"messages": MESSAGES, "guided_regex": "a"}), 400, "guided_regex")
        refused = {"messages": MESSAGES, "response_format": schema_format({"not": {}})}
        assert "not" in is_error(await client.post(CHAT, json=refused), 400, "response_format")["message"]
    constraint = engine.requests[0].constraint
    assert constraint is not None and "final" in constraint.source and engine.requests[0].thought is None


async def test_truncation_is_told(client: httpx.AsyncClient) -> None:
    answer = await choice(client, guided_regex="a{50}", max_tokens=3)
    assert answer["finish_reason"] == "length" and answer["message"]["content"].startswith("a")
    assert (await choice(client, guided_regex="a", max_tokens=1))["finish_reason"] == "stop"


async def test_logprobs_and_choices_go_with_it(client: httpx.AsyncClient) -> None:
    body = {**HOT, "guided_choice": ["on", "off"], "logprobs": True, "top_logprobs": 2, "n": 4}
    choices = (await client.post(CHAT, json=body)).json()["choices"]
    for one in choices:
        assert one["message"]["content"] in ("on", "off")
        told = b"".join(bytes(entry["bytes"]) for entry in one["logprobs"]["content"])
        assert told.decode() == one["message"]["content"]


async def test_bans_that_leave_no_token_end_that_request_alone(client: httpx.AsyncClient) -> None:
    banned = {**HOT, "guided_regex": "a{9}", "logit_bias": [["a", False]]}
    bystander = asyncio.create_task(whole(client, guided_regex="[bc]{40}"))
    is_error(await client.post(CHAT, json=banned), 400, ANY_PARAM)
    assert len(await bystander) == 40
