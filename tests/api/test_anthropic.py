"""Anthropic's dialect: requests as its clients send them, answers in blocks, errors in its envelope."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.api.options import ApiLimits, ApiOptions
from app.engine.service import Phase
from app.errors import DeviceLost
from tests.api.conftest import client_for
from tests.api.live import live_server
from tests.api.support import CHAT
from tests.api.test_reasoning import THINKS
from tests.api.test_tools import ADD, HERMES, TIME, TWO
from tests.fakes.engine import CHATML, FakeEngine

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "claude-x", "max_tokens": 1000, "messages": HI}
TOOLS = [
    {"name": "add", "description": "Adds.", "input_schema": ADD, "cache_control": {"type": "ephemeral"}},
    {"name": "time", "type": "custom", "input_schema": TIME},
]
HERMES_THINKS = HERMES + "{# <think> #}"


def prompt_of(engine: FakeEngine) -> str:
    """What the model was shown last."""
    return str(engine.tokenizer.decode(engine.requests[-1].prompt, show_special=True))


def turns_of(engine: FakeEngine) -> list[str]:
    """The turns of a ChatML prompt, each as `role:text`."""
    parts = prompt_of(engine).removeprefix("<s>").split("<|im_start|>")[1:]
    return [part.removesuffix("<|im_end|>\n").replace("\n", ":", 1) for part in parts]


async def ask(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    response = await client.post(MESSAGES, json={**BODY, **changes})
    assert response.status_code == 200, response.text
    return dict(response.json())


def events_in(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names must be their types; comments are left out."""
    events = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def events_of(client: httpx.AsyncClient, **changes: Any) -> list[dict[str, Any]]:
    response = await client.post(MESSAGES, json={**BODY, **changes, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_in(response.text)


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells, by the rules of the dialect; checks the order of its events."""
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    assert events[-2]["type"] == "message_delta"
    message, is_open = events[0]["message"], False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(event["content_block"] | {"parts": []})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        block["parts"].append(delta["partial_json"])
                    case kind:
                        block[kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
            case "content_block_stop":
                block = message["content"][-1]
                parts = block.pop("parts")
                if parts:
                    block["input"] = json.loads("".join(parts))
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def is_error(response: httpx.Response, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    """Check the envelope; returns the error object."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error" and set(body) == {"type", "error", "request_id"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    error = dict(body["error"])
    assert error["type"] == kind and error["message"]
    assert error["details"].get("param") == param, error
    return error


async def test_an_answer(client: httpx.AsyncClient) -> None:
    message = await ask(client)
    assert message.pop("id").startswith("msg_")
    n_tokens = len("Hello from the fake engine.")
    n_prompt = (await client.post(COUNT, json={"messages": HI})).json()["input_tokens"]
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello from the fake engine."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": n_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": n_tokens,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("template", "reply", "kinds"),
    [
        (CHATML, "Hello.", ["text"]),
        (CHATML, "", []),
        (CHATML, " \n", ["text"]),
        (HERMES, TWO, ["text", "tool_use", "tool_use"]),
        (HERMES, TWO.removeprefix("Let me see."), ["tool_use", "tool_use"]),
        (HERMES_THINKS, "<think>\nmm 漢\n</think>\n\n" + TWO, ["thinking", "text", "tool_use", "tool_use"]),
        (
            HERMES_THINKS,
            "<think>\nmm\n</think>\n\n\n" + TWO.removeprefix("Let me see."),
            ["thinking"] + 2 * ["tool_use"],
        ),
    ],
)
async def test_streams_say_the_same(template: str, reply: str, kinds: list[str]) -> None:
    async with client_for(FakeEngine(template=template, reply=lambda request: reply)) as client:
        asked = {"tools": TOOLS, "thinking": {"type": "adaptive"}}
        message, streamed = await ask(client, **asked), added_up(await events_of(client, **asked))
    assert [block["type"] for block in message["content"]] == kinds
    for each in (message, streamed):
        del each["id"]
        for block in each["content"]:
            block.pop("id", None)
    assert message == streamed


async def test_blocks() -> None:
    reply = "<think>\nmm 漢\n</think>\n\n" + TWO
    async with client_for(FakeEngine(template=HERMES_THINKS, reply=lambda request: reply)) as client:
        message = await ask(client, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 2000})
    thought, text, add, time = message["content"]
    assert thought["thinking"] == "mm 漢" and thought["signature"]
    assert text["text"] == "Let me see."
    assert (add["name"], add["input"]) == ("add", {"a": 2, "b": 3})
    assert (time["name"], time["input"]) == ("time", {"zone": "UTC"})
    assert add["id"] != time["id"] and message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_thoughts_that_are_not_shown_come_back() -> None:
    """Their text is in the signature, which clients send with the next request."""
    engine = FakeEngine(template=THINKS, reply=lambda request: "<think>\nmm 漢\n</think>\n\nYes.")
    hidden = {"type": "adaptive", "display": "omitted"}
    async with client_for(engine) as client:
        thought, text = (await ask(client, thinking=hidden))["content"]
        streamed = added_up(await events_of(client, thinking=hidden))["content"][0]
        assert thought == streamed and thought["thinking"] == "" and text["text"] == "Yes."
        engine.template = type(engine.template)(SHOWS_THOUGHTS)
        for block in (thought, {**thought, "signature": "of someone else"}, {"type": "redacted_thinking", "data": "x"}):
            await ask(client, messages=[*HI, {"role": "assistant", "content": [block, text]}, *HI])
            assert ("(mm 漢)Yes." in prompt_of(engine)) == (block is thought)


SHOWS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FULL = "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("changes", "reason", "stop_sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 5}, "max_tokens", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": 10**9, "messages": [{"role": "user", "content": "x" * 4030}]}, FULL, None),
        ({"stop_sequences": ["never", "fake"]}, "stop_sequence", "fake"),
    ],
)
async def test_why_answers_end(
    client: httpx.AsyncClient, engine: FakeEngine, changes: dict[str, Any], reason: str, stop_sequence: str | None
) -> None:
    if reason == FULL:
        engine.reply = lambda request: "y" * 100
    message = await ask(client, **changes)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop_sequence)
    assert added_up(await events_of(client, **changes))["stop_reason"] == reason


async def test_cut_in_the_middle_of_arguments() -> None:
    async with client_for(FakeEngine(template=HERMES, reply=lambda request: TWO)) as client:
        message = await ask(client, tools=TOOLS, max_tokens=len(TWO) - 30)
        assert message["stop_reason"] == "max_tokens" and message["content"][1]["input"] == {"a": 2, "b": 3}
        events = await events_of(client, tools=TOOLS, max_tokens=len(TWO) - 30)
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_cached_tokens_are_no_input(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    n_prompt = (await ask(client))["usage"]["input_tokens"]
    engine.cached_tokens = 7
    events = await events_of(client)
    for usage in (events[0]["message"]["usage"], events[-2]["usage"], (await ask(client))["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (n_prompt - 7, 7)


@pytest.mark.parametrize(
    "content",
    [
        "hi",
        [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}],
        [{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "hi"}]}}],
        [{"type": "search_result", "source": "", "title": "", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
async def test_text_in_all_its_forms(client: httpx.AsyncClient, engine: FakeEngine, content: Any) -> None:
    await ask(client, messages=[{"role": "user", "content": content}], system="Be brief.")
    assert turns_of(engine) == ["system:Be brief.", "user:hi", "assistant:"]


async def test_the_same_prompt_as_in_a_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, system=[{"type": "text", "text": "A."}, {"type": "text", "text": "B."}])
    chat = [{"role": "system", "content": "A.\n\nB."}, *HI]
    await client.post(CHAT, json={"messages": chat})
    assert engine.requests[0].prompt == engine.requests[1].prompt


async def test_turns_of_one_role_become_one(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(
        client,
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": [{"type": "text", "text": "e"}]},
            {"role": "system", "content": "f"},
            {"role": "user", "content": "g"},
        ],
    )
    assert turns_of(engine) == ["user:a\nb\nc", "assistant:d\n\ne", "system:f", "user:g", "assistant:"]


async def test_the_last_turn_is_continued(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, messages=[*HI, {"role": "assistant", "content": [{"type": "text", "text": "Hel"}]}])
    assert turns_of(engine)[-1] == "assistant:Hel"


CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "b": 3}}
SHOWS_RESULTS = HERMES.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_call_id %}<{{ m.name }}>{% endif %}")


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "5"}, "5"),
        ({"content": [{"type": "text", "text": "5"}, {"type": "text", "text": "6"}]}, "5\n6"),
        ({"content": [{"type": "image", "source": {"type": "base64"}}]}, "[an image that this model cannot see]"),
        ({"content": [{"type": "tool_reference", "tool_name": "Read"}]}, "Read"),
        ({}, ""),
        ({"content": "no", "is_error": True}, "Error: no"),
        ({"content": "<tool_use_error>no", "is_error": True}, "<tool_use_error>no"),
    ],
)
async def test_calls_and_results(result: dict[str, Any], shown: str) -> None:
    engine = FakeEngine(template=SHOWS_RESULTS)
    results = [{"type": "tool_result", "tool_use_id": "toolu_1", **result}, {"type": "text", "text": "and now?"}]
    async with client_for(engine) as client:
        messages = [*HI, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": results}]
        await ask(client, messages=messages, tools=TOOLS)
    *_, call, told, user, _ = turns_of(engine)
    assert call == 'assistant:<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert told == f"tool:{shown}<add>" and user == "user:and now?"


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, ["add", "time"]),
        ({"type": "none"}, []),
        ({"type": "any"}, ["add", "time"]),
        ({"type": "tool", "name": "time"}, ["time"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["add"]),
    ],
)
async def test_choosing_tools(choice: dict[str, Any], wanted: list[str]) -> None:
    calls = TWO if choice != {"type": "tool", "name": "time"} else TWO[TWO.rindex("<tool_call>") :]
    engine = FakeEngine(template=HERMES, reply=lambda request: calls)
    async with client_for(engine) as client:
        message = await ask(client, tools=TOOLS, tool_choice=choice)
    assert [block["name"] for block in message["content"] if block["type"] == "tool_use"] == wanted
    assert (engine.requests[-1].constraint is not None) == (choice["type"] in ("any", "tool"))
    assert ("Tools:" in prompt_of(engine)) == (choice["type"] != "none")


async def test_tools_of_other_servers_are_passed_over() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    engine = FakeEngine(template=HERMES)
    async with client_for(engine) as client:
        await ask(client, tools=[search, *TOOLS])
        assert "web_search" not in prompt_of(engine)
        for body, param in (
            ({"tools": [search]}, "tools"),
            ({"tools": [search, *TOOLS], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ):
            error = is_error(await client.post(MESSAGES, json={**BODY, **body}), 400, "invalid_request_error", param)
            assert "Anthropic" in error["message"]


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "enabled"}, True)],
)
async def test_thinking_is_asked_for(engine: FakeEngine, thinking: Any, thinks: bool) -> None:
    engine.template = type(engine.template)(CHATML + "{% if enable_thinking %}THINK{% endif %}")
    async with client_for(engine) as client:
        await ask(client, thinking=thinking)
    assert prompt_of(engine).endswith("THINK") == thinks


@pytest.mark.parametrize("place", ["output_config", "output_format"])
async def test_forms_and_efforts(engine: FakeEngine, place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    body = {"output_config": {"format": form, "effort": "max"}} if place == "output_config" else {place: form}
    engine.template = type(engine.template)(CHATML + "{{ reasoning_effort }}")
    async with client_for(engine) as client:
        await ask(client, **body)
        constraint = engine.requests[-1].constraint
        assert constraint is not None and json.loads(constraint.source) == form["schema"]
        assert prompt_of(engine).endswith("high") == (place == "output_config")
        form["schema"] = {"type": "objct"}
        response = await client.post(MESSAGES, json={**BODY, **body})
        is_error(response, 400, "invalid_request_error", "output_config.format")


async def test_sampling(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, temperature=0.5, top_p=0.9, top_k=7, seed=3, min_p=0.1, metadata={"user_id": "u"})
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)


async def test_the_billing_header_is_not_for_the_model(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    prompts = set()
    for mark in ("cch=00001;", "cch=00002;"):
        header = f"x-anthropic-billing-header: cc_version=2.1.7.a; cc_entrypoint=cli; {mark}"
        for system in (
            [{"type": "text", "text": header}, {"type": "text", "text": "You are an agent."}],
            f"{header}\nYou are an agent.",
        ):
            await ask(client, system=system)
            prompts.add(engine.requests[-1].prompt)
    assert len(prompts) == 1 and turns_of(engine)[0] == "system:You are an agent."


async def test_counting(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"messages": HI, "system": "Be brief.", "tools": TOOLS, "thinking": {"type": "adaptive"}}
    count = (await client.post(f"{COUNT}?beta=true", json=asked)).json()
    usage = (await ask(client, **asked))["usage"]
    assert count == {"input_tokens": usage["input_tokens"]} == {"input_tokens": len(engine.requests[-1].prompt)}
    too_long = {"messages": [{"role": "user", "content": "x" * 10_000}]}
    assert (await client.post(COUNT, json=too_long)).json()["input_tokens"] > 10_000


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].id"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0]"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_refusals(client: httpx.AsyncClient, changes: dict[str, Any], param: str, streamed: bool) -> None:
    response = await client.post(MESSAGES, json={**BODY, **changes, "stream": streamed})
    is_error(response, 400, "invalid_request_error", param)


async def test_other_errors(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    too_long = {**BODY, "messages": [{"role": "user", "content": "x" * 10_000}]}
    error = is_error(await client.post(MESSAGES, json=too_long), 400, "invalid_request_error", "messages")
    assert error["message"].startswith("prompt is too long: ") and "> 4095 maximum" in error["message"]
    is_error(await client.post(MESSAGES, content=b"{"), 400, "invalid_request_error")
    is_error(await client.get(MESSAGES), 405, "invalid_request_error")
    is_error(await client.post(f"{MESSAGES}/batches", json={}), 404, "not_found_error")
    engine.capacity = 0
    response = await client.post(MESSAGES, json=BODY)
    is_error(response, 529, "overloaded_error")
    assert response.headers["retry-after"] == "3"
    engine.set_status(phase=Phase.LOADING)
    is_error(await client.post(MESSAGES, json=BODY), 503, "overloaded_error")
    engine.set_status(phase=Phase.DEGRADED, lost_devices=("w:1",))
    is_error(await client.post(MESSAGES, json=BODY), 503, "overloaded_error")


async def test_keys_and_models() -> None:
    options = ApiOptions(api_keys=("k",), any_model=False)
    async with client_for(FakeEngine(), options) as client:
        response = await client.post(MESSAGES, json=BODY)
        is_error(response, 401, "authentication_error")
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        is_error(await client.post(MESSAGES, json=BODY, headers=headers), 404, "not_found_error", "model")
        answer = await client.post(MESSAGES, json={**BODY, "model": "fake"}, headers=headers)
        assert answer.status_code == 200 and answer.headers["request-id"].startswith("req_")
        assert (await client.head("/")).status_code == 200


async def test_bodies_that_are_too_large() -> None:
    async with client_for(FakeEngine(), ApiOptions(limits=ApiLimits(body_bytes=100))) as client:
        is_error(await client.post(MESSAGES, content=b" " * 101), 413, "request_too_large")


async def test_errors_in_a_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_with, engine.fail_after = DeviceLost("w2:50052", "connection reset"), 3
    events = await events_of(client)
    assert [event["type"] for event in events].count("content_block_delta") == 3
    last = events[-1]
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
    assert "w2:50052" in last["error"]["message"] and last["request_id"].startswith("req_")
    is_error(await client.post(MESSAGES, json=BODY), 503, "overloaded_error")


def test_silences_are_broken_by_pings() -> None:
    engine = FakeEngine()
    with live_server(engine, ApiOptions(keepalive_s=0.05)) as server:
        engine.gate.close()
        exchange = server.post(MESSAGES, {**BODY, "stream": True})
        received = exchange.read_until(b'event: ping\ndata: {"type":"ping"}\n\n')
        assert b"event: message_start" in received and b"text_delta" not in received
        engine.gate.open()
        exchange.read_until(b"event: message_stop")
        exchange.close()


def test_a_client_that_goes_away() -> None:
    engine = FakeEngine()
    with live_server(engine) as server:
        for streamed in (True, False):
            engine.abort_seen.clear()
            engine.started.clear()
            engine.gate.close()
            exchange = server.post(MESSAGES, {**BODY, "stream": streamed})
            assert engine.started.wait(10)
            exchange.reset()
            assert engine.abort_seen.wait(10)
