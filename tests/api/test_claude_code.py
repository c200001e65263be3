"""An agent's session as Claude Code sends it: its headers and fields, its side requests, and twenty turns of which each
computes only what is new."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from app.api.app import create_app
from app.api.options import ApiOptions
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from tests.api.test_anthropic import COUNT, MESSAGES, added_up, events_in
from tests.api.test_tools import HERMES
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import open_engine

HEADERS = {
    "authorization": "Bearer sesame",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "user-agent": "claude-cli/2.1.37 (external, cli)",
}
CACHED = {"cache_control": {"type": "ephemeral"}}
PATH = {"type": "object", "properties": {"path": {"enum": ["a.py", "b.py"]}}, "required": ["path"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "Read", "description": "Reads a file.", "input_schema": {**PATH, "additionalProperties": False}},
    {"name": "mcp__docs__search", "description": "Searches.", "input_schema": {**PATH, "additionalProperties": False}},
]
#: The header line's last field differs in every request.
billing = (
    f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={n:05x};" for n in itertools.count()
)


def request(messages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A request of the main conversation."""
    return {
        "model": "claude-opus-4-6",
        "max_tokens": 200,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": "user_0_account__session_1"},
        "system": [
            {"type": "text", "text": next(billing)},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **CACHED},
            {"type": "text", "text": "Help with software. " * 8, **CACHED},
        ],
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "messages": messages,
        **changes,
    }


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = TinyLlama(GGMLType.F16, n_ctx=8192, extra={"tokenizer.chat_template": HERMES})
    path = write_tiny_llama(tmp_path_factory.mktemp("agent") / "tiny.gguf", model)
    device = NumpyDevice("CPU")
    engine = open_engine(path, [device], ctx_size=16384, n_slots=2, n_ubatch=256)
    yield engine
    engine.close()
    engine.check_integrity()
    device.close()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine, ApiOptions(api_keys=("sesame",))))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60, headers=HEADERS) as client:
        yield client


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(f"{MESSAGES}?beta=true", json=body)
    assert response.status_code == 200, response.text
    return added_up(events_in(response.text)) if body["stream"] else response.json()


async def test_a_session(client: httpx.AsyncClient) -> None:
    assert (await client.head("/")).status_code == 200
    reminder = {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>\n"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "Mend the test.", **CACHED}]}
    ]
    n_before = 0
    for turn in range(20):
        choice = {"type": "tool", "name": TOOLS[turn % 2]["name"]}
        body = request(messages, tool_choice=choice)
        count = await client.post(
            f"{COUNT}?beta=true", json={k: body[k] for k in ("model", "messages", "system", "tools")}
        )
        message = await ask(client, body)
        usage = message["usage"]
        n_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert n_prompt == count.json()["input_tokens"]
        assert message["stop_reason"] == "tool_use" and [block["type"] for block in message["content"]] == ["tool_use"]
        assert usage["cache_read_input_tokens"] >= n_before, f"turn {turn} computes old tokens again"
        call = message["content"][0]
        assert call["name"] == choice["name"] and call["input"]["path"] in ("a.py", "b.py")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": f"line {turn}", **CACHED}
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
        n_before = n_prompt
        if turn == 3:
            await side_request(client)


async def side_request(client: httpx.AsyncClient) -> None:
    """Titles and the like are asked of a smaller model, in a conversation of their own."""
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}
    title = request(
        [{"role": "user", "content": "Is this a new topic?"}],
        model="claude-haiku-4-5-20251001",
        tools=[],
        temperature=0,
        stream=False,
        thinking={"type": "disabled"},
        system=[{"type": "text", "text": next(billing)}, {"type": "text", "text": "Answer in JSON."}],
        output_config={"format": form},
    )
    message = await ask(client, title)
    assert message["content"][0]["type"] == "text" and message["content"][0]["text"].startswith("{")
    quota = {"model": "claude-haiku-4-5-20251001", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    assert (await client.post(MESSAGES, json=quota)).json()["stop_reason"] in ("max_tokens", "end_turn")


async def test_a_session_that_outgrows_the_context(client: httpx.AsyncClient) -> None:
    """The words that make the agent shorten its conversation, and the count that makes it do so in time."""
    body = request([{"role": "user", "content": "x" * 20_000}])
    response = await client.post(f"{MESSAGES}?beta=true", json=body)
    assert response.status_code == 400 and "prompt is too long" in response.json()["error"]["message"]
    count = await client.post(COUNT, json={k: body[k] for k in ("model", "messages", "system", "tools")})
    assert count.json()["input_tokens"] > 8192
