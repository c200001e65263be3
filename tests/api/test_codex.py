"""Codex's sessions as it sends them: its twelve fields, its kinds of tools and items, and twenty turns of which each
computes only what is new."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from app.api.app import create_app
from app.api.options import ApiOptions
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from tests.api.conftest import client_for
from tests.api.responses import HERMES, RESPONSES, called, check_order, events_of
from tests.fakes.engine import FakeEngine
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import open_engine

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": NOTHING},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Use the apply_patch tool to edit files. This is a FREEFORM tool, so do not wrap it in JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: begin_patch\nbegin_patch: "*** Begin"'},
    },
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Tools in the mcp__docs namespace.",
        "tools": [{"type": "function", "name": "search", "description": "", "strict": False, "parameters": NOTHING}],
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search"},
]
ENVIRONMENT = "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>"


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def request(given: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The twelve fields of every request."""
    return {
        "model": "gpt-5.2-codex",
        "instructions": "You are Codex, a coding agent. " * 6,
        "input": given,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81a0-7800-8aa1-bbab2a035a53",
        "client_metadata": {"x-codex-installation-id": "1"},
        **changes,
    }


FIRST = [message("developer", "<permissions instructions>"), message("user", ENVIRONMENT), message("user", "Mend it.")]


async def test_every_kind_of_tool_in_one_session() -> None:
    patch = "*** Begin Patch\n*** Update File: a.py\n@@\n-x = 1\n+x = 2\n*** End Patch"
    replies = [
        f"<think>\nLook.\n</think>\n\n{called('shell', {'command': ['ls', '-l']})}",
        called("apply_patch", {"input": patch}),
        called("mcp__docs__search", {"query": "x"}),
        "Done.",
    ]
    engine = FakeEngine(template=HERMES + "{# <think> #}", reply=lambda _: replies[len(engine.requests) - 1])
    given = list(FIRST)
    outputs: dict[str, Any] = {
        "function_call": ("function_call_output", "a.py"),
        "custom_tool_call": ("custom_tool_call_output", '{"output": "Success.", "metadata": {"exit_code": 0}}'),
    }
    seen = []
    async with client_for(engine) as client:
        for _ in replies:
            *_, last = await events_of(client, **request(given))
            assert last["type"] == "response.completed" and last["response"]["usage"]["total_tokens"] > 0
            given += last["response"]["output"]
            call = last["response"]["output"][-1]
            seen.append((call["type"], call.get("namespace"), call.get("name"), call.get("input")))
            if call["type"] in outputs:
                kind, text = outputs[call["type"]]
                given.append({"type": kind, "call_id": call["call_id"], "output": text})
    assert seen == [
        ("function_call", None, "shell", None),
        ("custom_tool_call", None, "apply_patch", patch),
        ("function_call", "mcp__docs", "search", None),
        ("message", None, None, None),
    ]
    shown = engine.tokenizer.decode(engine.requests[-1].prompt, show_special=True)
    assert json.dumps(patch)[1:-1] in shown and "Success." in shown and "mcp__docs__search" in shown
    assert shown.index("You are Codex") < shown.index("<permissions instructions>") < shown.index("<cwd>")


async def test_its_probe_and_its_catalogue(client: httpx.AsyncClient) -> None:
    probe = request([], max_output_tokens=1, tools=[], stream=False)
    assert (await client.post(RESPONSES, json=probe)).json()["usage"]["output_tokens"] == 1
    catalogue = (await client.get("/v1/models")).json()
    assert catalogue["models"] and catalogue["data"]


async def test_steps_of_other_providers_do_no_harm(client: httpx.AsyncClient) -> None:
    hosted = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": ""},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
    ]
    assert (await client.post(RESPONSES, json=request([*FIRST, *hosted]))).status_code == 200


@pytest.fixture(scope="module")
def engine_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = TinyLlama(GGMLType.F16, n_ctx=8192, extra={"tokenizer.chat_template": HERMES})
    path = write_tiny_llama(tmp_path_factory.mktemp("codex") / "tiny.gguf", model)
    device = NumpyDevice("CPU")
    engine = open_engine(path, [device], ctx_size=16384, n_slots=2, n_ubatch=256)
    yield engine
    engine.close()
    engine.check_integrity()
    device.close()


@pytest.fixture
async def agent(engine_file: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine_file, ApiOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client


#: Unasked white space in arguments, which the template would write in its own way, is unlikely then.
PLAIN = [[text, -100] for text in (" ", "\n", "\t")]


@pytest.mark.parametrize("chained", [False, True], ids=["whole", "chained"])
async def test_twenty_turns_compute_only_what_is_new(agent: httpx.AsyncClient, chained: bool) -> None:
    given = [*FIRST, message("user", f"chained: {chained}")]
    body = request(given, tool_choice={"type": "function", "name": "shell"}, logit_bias=PLAIN, store=chained)
    n_known = 0
    for turn in range(20):
        *_, last = await events_of(agent, **body)
        response = last["response"]
        usage = response["usage"]
        assert last["type"] == "response.completed"
        cached = usage["input_tokens_details"]["cached_tokens"]
        # The last token of what is known is computed again where the prompt ends there, and one may have been cut off.
        assert cached >= n_known - 2, f"turn {turn} computes {n_known - cached} tokens again"
        n_known = usage["total_tokens"]
        (call,) = response["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": f"line {turn}"}
        if chained:
            body = {**body, "input": [output], "previous_response_id": response["id"]}
        else:
            body["input"] += [call, output]


async def test_a_stream_of_a_real_model_is_in_order(agent: httpx.AsyncClient) -> None:
    events = await events_of(agent, **request(FIRST, max_output_tokens=8))
    check_order(events)
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
