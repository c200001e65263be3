"""The anthropic package against a real server. Skips where the package is absent; `tandem-llm[clients]` brings it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.api.options import ApiOptions
from app.errors import DeviceLost
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.api.test_tools import ADD, HERMES, TIME, TWO
from tests.fakes.engine import FakeEngine

anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.filterwarnings("ignore")  # what the package warns of is its own

ANSWER = "Hello from the fake engine."
THOUGHT = "<think>\nmm 漢\n</think>\n\n"
KEY = "sesame"
HI: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "claude-x", "max_tokens": 1000, "messages": HI}
TOOLS: list[Any] = [{"name": "add", "input_schema": ADD}, {"name": "time", "input_schema": TIME}]


def reply(request: Any) -> str:
    """Calls and thoughts as the last turn asks for them."""
    text = bytes(token for token in request.prompt if token < 256).decode("utf-8", "replace")
    if "tool\n" in text:
        return "It is 5."
    thought = THOUGHT if "think" in text.rsplit("user\n", 1)[1] else ""
    return thought + (TWO if "Tools:" in text else ANSWER)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = FakeEngine(template=HERMES + "{# <think> #}", reply=reply)
    with live_server(engine, ApiOptions(api_keys=(KEY,))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(autouse=True)
def engine(server: LiveServer) -> Iterator[FakeEngine]:
    yield server.engine
    server.engine.reset()


def test_create(client: Any) -> None:
    message = client.messages.create(**ASKED, system=[{"type": "text", "text": "Be brief."}])
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ANSWER}]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == len(ANSWER)
    assert message._request_id.startswith("req_")


def test_stream(client: Any) -> None:
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == ANSWER
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == len(ANSWER)
    raw = list(client.messages.create(**ASKED, stream=True))
    assert [event.type for event in raw][:2] == ["message_start", "content_block_start"]
    assert [event.type for event in raw][-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_thinking(client: Any) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "think"}]}
    with client.messages.stream(**asked, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        kinds = [event.type for event in stream]
        thought, text = stream.get_final_message().content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "mm 漢", ANSWER)
    assert thought.signature and "thinking" in kinds and "signature" in kinds
    again = [*asked["messages"], {"role": "assistant", "content": [thought, text]}, *HI]
    assert client.messages.create(**{**asked, "messages": again}).content[0].text == ANSWER


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(client: Any, streamed: bool) -> None:
    asked = {**ASKED, "tools": TOOLS}
    if streamed:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    text, *calls = message.content
    assert text.text == "Let me see." and message.stop_reason == "tool_use"
    assert [(call.name, call.input) for call in calls] == [("add", {"a": 2, "b": 3}), ("time", {"zone": "UTC"})]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "5"} for call in calls]
    again = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert client.messages.create(**{**asked, "messages": again}).content[0].text == "It is 5."


def test_tool_runner(client: Any) -> None:
    """The package's own loop: it calls what the model asks for, until an answer calls nothing."""
    seen = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds.

        Args:
            a: one
            b: the other
        """
        seen.append((a, b))
        return str(a + b)

    @anthropic.beta_tool
    def time(zone: str) -> str:
        """Tells the time.

        Args:
            zone: where
        """
        seen.append(zone)
        return "noon"

    last = client.beta.messages.tool_runner(**ASKED, tools=[add, time]).until_done()
    assert seen == [(2, 3), "UTC"] and last.content[0].text == "It is 5."


def test_count_tokens(client: Any, engine: FakeEngine) -> None:
    count = client.messages.count_tokens(model="m", messages=HI, tools=TOOLS, system="Be brief.")
    client.messages.create(**ASKED, tools=TOOLS, system="Be brief.")
    assert count.input_tokens == len(engine.requests[-1].prompt)


def test_models(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.max_input_tokens) == ("fake", "fake-model", 4096)
    assert client.models.retrieve("fake").created_at.year == 2023


def test_errors(client: Any, server: LiveServer, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x" * 9000}]})
    assert caught.value.type == "invalid_request_error" and caught.value.request_id.startswith("req_")
    assert "prompt is too long" in caught.value.message and caught.value.error_code == "context_length_exceeded"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(**ASKED)
    engine.capacity = 0
    with pytest.raises(anthropic.OverloadedError) as overloaded:
        client.messages.create(**ASKED)
    assert overloaded.value.type == "overloaded_error"


def test_an_error_in_a_stream(client: Any, engine: FakeEngine) -> None:
    engine.fail_with, engine.fail_after = DeviceLost("w2:50052", "connection reset"), 3
    with (
        client.messages.stream(**ASKED) as stream,
        pytest.raises(anthropic.APIStatusError, match="w2:50052") as caught,
    ):
        list(stream)
    assert caught.value.type == "overloaded_error"


def test_leaving_a_stream(client: Any, engine: FakeEngine) -> None:
    engine.gate.close()
    with client.messages.stream(**ASKED) as stream:
        assert next(iter(stream)).type == "message_start"
    assert engine.abort_seen.wait(WAIT_S)
