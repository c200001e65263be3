"""/v1/responses: items, events in order, tools of every kind there and back, forms, and refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.errors import DeviceLost
from tests.api.conftest import client_for
from tests.api.responses import (
    ADD,
    FILES,
    HERMES,
    PATCH,
    RESPONSES,
    called,
    events_of,
    respond,
    text_of,
    without_ids,
)
from tests.api.support import ANY_PARAM, CHAT, is_error
from tests.fakes.engine import FakeEngine

THINKING = HERMES + "{# <think> #}"
WORDS = "Hello from the fake engine."
CALLS = called("add", {"a": 2}) + "\n" + called("mcp__files__read", {"path": "x"})
WORK = f"<think>\nhm\n</think>\n\nLet me see.\n\n{CALLS}"
TOOLS = [ADD, PATCH, FILES, {"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"}]


def prompt_of(engine: FakeEngine, at: int = -1) -> str:
    text: str = engine.tokenizer.decode(engine.requests[at].prompt, show_special=True)
    return text


def saying(reply: str) -> FakeEngine:
    return FakeEngine(template=THINKING, reply=lambda request: reply)


async def both(engine: FakeEngine, **body: Any) -> dict[str, Any]:
    """The whole response, which must be what a stream of it adds up to."""
    async with client_for(engine) as client:
        whole = await respond(client, **body)
        *_, last = await events_of(client, **body)
    assert without_ids(last["response"]) == without_ids(whole)
    return whole


async def test_text(engine: FakeEngine) -> None:
    answer = await both(engine, input="hi", instructions="Be brief.", metadata={"k": "v"}, max_output_tokens=100)
    (item,) = answer["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": WORDS, "annotations": [], "logprobs": []}]
    assert answer["status"] == "completed" and answer["error"] is None and answer["incomplete_details"] is None
    assert answer["metadata"] == {"k": "v"} and answer["instructions"] == "Be brief."
    usage = answer["usage"]
    assert usage["input_tokens"] == len(engine.requests[0].prompt) and usage["output_tokens"] == len(WORDS)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert prompt_of(engine).index("Be brief.") < prompt_of(engine).index("user\nhi")


async def test_the_same_prompt_as_a_chat(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        await respond(client, input="hi", instructions="Be brief.")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        await client.post(CHAT, json={"messages": messages})
    assert engine.requests[0].prompt == engine.requests[1].prompt


async def test_thoughts_text_and_calls_are_items() -> None:
    engine = saying(WORK)
    engine.cached_tokens = 7
    answer = await both(engine, input="hi", tools=TOOLS)
    thought, message, add, read = answer["output"]
    assert thought["type"] == "reasoning" and thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text_of(answer) == "Let me see." and message["type"] == "message"
    assert (add["type"], add["name"], json.loads(add["arguments"])) == ("function_call", "add", {"a": 2})
    assert (read["name"], read["namespace"], json.loads(read["arguments"])) == ("read", "mcp__files", {"path": "x"})
    assert "namespace" not in add and add["call_id"] != read["call_id"] and add["id"] != add["call_id"]
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 7
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_thoughts_as_a_summary() -> None:
    answer = await both(saying(WORK), input="hi", tools=TOOLS, reasoning={"effort": "low", "summary": "auto"})
    thought = answer["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}] and "content" not in thought
    assert answer["reasoning"] == {"effort": "low", "summary": "auto"}


async def test_custom_tools_take_text() -> None:
    patch = '*** Begin Patch\n"quoted" \\ 漢🙂\t*** End Patch'
    engine = saying(called("apply_patch", {"input": patch}))
    answer = await both(engine, input="hi", tools=TOOLS)
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", patch)
    shown = prompt_of(engine)
    assert "Edits files." in shown and "*** Begin Patch" in shown and "mcp__files__read" in shown
    assert "web_search" not in shown


async def test_every_kind_of_tool_goes_back() -> None:
    engine = saying(WORK)
    async with client_for(engine) as client:
        first = await respond(client, input="hi", tools=TOOLS)
        _, _, add, read = first["output"]
        custom = {"type": "custom_tool_call", "call_id": "c9", "name": "apply_patch", "input": 'a "b"'}
        history = [
            {"role": "user", "content": "hi"},
            *first["output"],
            custom,
            {"type": "function_call_output", "call_id": add["call_id"], "output": "five"},
            {"type": "function_call_output", "call_id": read["call_id"], "output": PICTURED},
            {"type": "custom_tool_call_output", "call_id": "c9", "output": "Done"},
        ]
        await respond(client, input=history, tools=TOOLS)
    before, shown = prompt_of(engine, 0), prompt_of(engine, 1)
    assert shown.startswith(before + "<think>\nhm\n</think>\n\nLet me see.<tool_call>")
    marked = shown.split("assistant\n")[1].split("<tool_call>")[1:]
    calls = [json.loads(part.split("</tool_call>")[0]) for part in marked]
    assert calls == [
        {"name": "add", "arguments": {"a": 2}},
        {"name": "mcp__files__read", "arguments": {"path": "x"}},
        {"name": "apply_patch", "arguments": {"input": 'a "b"'}},
    ]
    assert "tool\nfive<|im_end|>" in shown and "tool\nDone<|im_end|>" in shown
    assert "tool\nseen\n[an image that this model cannot see]<|im_end|>" in shown


PICTURED = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": "data:image/png;base64,"}]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [({"max_output_tokens": 5}, "incomplete", "max_output_tokens"), ({}, "completed", None)],
)
async def test_how_it_ends(engine: FakeEngine, body: dict[str, Any], status: str, reason: str | None) -> None:
    answer = await both(engine, input="hi", **body)
    assert answer["status"] == status == answer["output"][-1]["status"]
    assert answer["incomplete_details"] == (reason and {"reason": reason})
    assert text_of(answer) == (WORDS if reason is None else WORDS[:5])


async def test_a_failure_is_the_last_event(engine: FakeEngine) -> None:
    engine.fail_with, engine.fail_after = DeviceLost("w:1", "connection closed"), 3
    async with client_for(engine) as client:
        *_, last = await events_of(client, input="hi")
        is_error(await client.post(RESPONSES, json={"input": "hi"}), 503, None, "device_lost")
        stored = (await client.get(f"{RESPONSES}/{last['response']['id']}")).json()
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "device_lost" and "w:1" in last["response"]["error"]["message"]
    assert text_of(last["response"]) == WORDS[:3] and stored == last["response"]


async def test_an_empty_probe(engine: FakeEngine) -> None:
    given: Any
    for given in ([], ""):
        answer = await both(engine, input=given, max_output_tokens=1)
        assert answer["usage"]["output_tokens"] == 1


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    answer = await both(saying(""), input="hi")
    assert text_of(answer) == "" and len(answer["output"]) == 1


async def test_forms(engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "s", "strict": True, "schema": schema}
    answer = await both(engine, input="hi", text={"format": form, "verbosity": "low"})
    assert answer["text"]["format"]["schema"] == schema and answer["text"]["verbosity"] == "low"
    constraint = engine.requests[0].constraint
    assert constraint is not None and json.loads(constraint.source) == schema
    async with client_for(engine) as client:
        bad = {"type": "json_schema", "name": "s", "schema": {"not": {}}}
        refused = await client.post(RESPONSES, json={"input": "hi", "text": {"format": bad}})
        error = is_error(refused, 400, "text.format")
        assert error["message"].startswith("text.format") and "not" in error["message"]


async def test_a_form_without_its_schema(client: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "name": "x"}
    response = await client.post(RESPONSES, json={"input": "hi", "text": {"format": form}})
    error = is_error(response, 400, "text.format.schema")
    assert error["message"] == "text.format of type json_schema needs a schema"


async def test_tool_choice() -> None:
    engine = saying(called("mcp__files__read", {}))
    kinds: list[tuple[Any, tuple[str, ...]]] = [
        ("required", ("add", "apply_patch", "mcp__files__read")),
        ({"type": "function", "name": "read", "namespace": "mcp__files"}, ("mcp__files__read",)),
        ({"type": "custom", "name": "apply_patch"}, ("apply_patch",)),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, ("add",)),
    ]
    async with client_for(engine) as client:
        for choice, names in kinds:
            answer = await respond(client, input="hi", tools=TOOLS, tool_choice=choice)
            assert answer["tool_choice"] == choice
            constraint = engine.requests[-1].constraint
            assert constraint is not None
            assert {name for name in kinds[0][1] if f'\\"{name}\\"' in constraint.source} == set(names)
        await respond(client, input="hi", tools=TOOLS, tool_choice="none")
        assert "Adds." not in prompt_of(engine)


async def test_logprobs(engine: FakeEngine) -> None:
    answer = await both(engine, input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == WORDS and len(entries[0]["top_logprobs"]) == 2


async def test_what_agents_send_besides_is_taken(engine: FakeEngine) -> None:
    await both(
        engine,
        input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="u",
        user="u",
        truncation="disabled",
        background=False,
        something_new=[1],
        store=False,
        stream_options={"include_obfuscation": False},
        reasoning=None,
        text=None,
        temperature=None,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"input": "hi", "tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name"),
        ({"input": "hi", "tools": [ADD, ADD]}, "tools[1].name"),
        ({"input": "hi", "tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "hi", "tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "temperature": 3}, "temperature"),
        ({"input": 5}, "input"),
        ({"input": "x" * 9000}, "input"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
async def test_refused(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    for streamed in (False, True):
        is_error(await client.post(RESPONSES, json={**body, "stream": streamed}), 400, param)


async def test_truncation_drops_the_oldest_turns() -> None:
    engine = FakeEngine(n_ctx=300)
    said = [{"role": role, "content": f"{role}{i} " + "x" * 60} for i in range(5) for role in ("user", "assistant")]
    body = {"input": [*said, {"role": "user", "content": "last"}], "instructions": "keep me"}
    async with client_for(engine) as client:
        is_error(await client.post(RESPONSES, json=body), 400, "input", "context_length_exceeded")
        answer = await respond(client, **body, truncation="auto")
        assert answer["truncation"] == "auto"
        shown = prompt_of(engine)
        assert "keep me" in shown and "last" in shown and "user4" in shown and "user0" not in shown
        assert shown.index("keep me") < shown.index("user")
        too_long = {"input": "x" * 400, "truncation": "auto"}
        is_error(await client.post(RESPONSES, json=too_long), 400, "input", "context_length_exceeded")


async def test_counting(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input": "hi", "instructions": "Be brief.", "tools": [ADD]}
    counted = (await client.post(f"{RESPONSES}/input_tokens", json=body)).json()
    await respond(client, **body)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(engine.requests[0].prompt)}


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling(engine: FakeEngine, streamed: bool) -> None:
    engine.gate.close()
    async with client_for(engine) as client:
        task = asyncio.create_task(client.post(RESPONSES, json={"input": "hi", "stream": streamed}))
        while not engine.running:
            await asyncio.sleep(0)
        (response_id,) = engine.running
        assert (await client.get(f"{RESPONSES}/{response_id}")).json()["status"] == "in_progress"
        told = (await client.post(f"{RESPONSES}/{response_id}/cancel")).json()
        assert told["status"] == "cancelled"
        assert "request_cancelled" in (await task).text and response_id in engine.aborted_ids
        assert (await client.get(f"{RESPONSES}/{response_id}")).json()["status"] == "cancelled"
        is_error(
            await client.post(RESPONSES, json={"input": "go on", "previous_response_id": response_id}), 400, ANY_PARAM
        )
