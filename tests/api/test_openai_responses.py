"""The openai package's Responses against a real server: answers, streams, parsed answers, tools, chains, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCompletedEvent, ResponseFunctionToolCall
from pydantic import BaseModel

from app.api.options import ApiOptions
from app.engine.request import GenerateRequest
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.api.responses import ADD, HERMES, PATCH, called
from tests.fakes.engine import FakeEngine

ANSWER = "Hello from the fake engine."
PATCHED = '*** Begin Patch\n"x"\n*** End Patch'


class Point(BaseModel):
    """A point with a label."""

    x: int
    label: str


def reply(request: GenerateRequest) -> str:
    """What the last turn asks for."""
    turn = bytes(token for token in request.prompt if token < 256).decode("utf-8", "replace").rsplit("user\n", 1)[-1]
    if request.constraint is not None:
        return '{"x": 3, "label": "a"}'
    if "tool\n" in turn:
        return "It is 5."
    if "patch" in turn:
        return called("apply_patch", {"input": PATCHED})
    return f"<think>\nhm\n</think>\n\nOne.{called('add', {'a': 2})}" if "call" in turn else ANSWER


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = FakeEngine(template=HERMES + "{# <think> #}", reply=reply)
    with live_server(engine, ApiOptions(api_keys=("sesame",))) as server:
        yield server


@pytest.fixture
def engine(server: LiveServer) -> Iterator[FakeEngine]:
    yield server.engine
    server.engine.reset()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0, timeout=WAIT_S) as client:
        yield client


TOOLS: Any = [ADD, PATCH]


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi", instructions="Be brief.")
    assert answer.output_text == ANSWER and answer.status == "completed"
    assert answer.usage is not None and answer.usage.output_tokens == len(ANSWER)
    assert client.responses.retrieve(answer.id).output_text == ANSWER
    (item,) = client.responses.input_items.list(answer.id)
    assert item.type == "message"
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="hi", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent) and last.response.output_text == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="please call", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds and "response.function_call_arguments.done" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert kinds[-1] == "response.completed" and final.output_text == "One."


def test_parsed_answers(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="fake", input="a point", text_format=Point)
    assert answer.output_parsed == Point(x=3, label="a")
    with client.responses.stream(model="fake", input="a point", text_format=Point) as stream:
        assert stream.until_done().get_final_response().output_parsed == Point(x=3, label="a")


def test_a_tool_loop_over_stored_responses(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model="fake", input="please call", tools=TOOLS)
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall) and json.loads(call.arguments) == {"a": 2}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    second = client.responses.create(model="fake", input=[output], previous_response_id=first.id, tools=TOOLS)
    assert second.output_text == "It is 5." and second.previous_response_id == first.id
    before, after = (request.prompt for request in engine.requests[-2:])
    assert after[: len(before)] == before


def test_a_custom_tool(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="patch it", tools=TOOLS)
    (call,) = answer.output
    assert call.type == "custom_tool_call" and call.input == PATCHED
    events = client.responses.create(model="fake", input="patch it", tools=TOOLS, stream=True)
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCHED and len(deltas) > 10


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi", max_output_tokens=5)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output_text == ANSWER[:5]


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="hi", previous_response_id="resp_gone")
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="x" * 9000, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_counting(client: openai.OpenAI, engine: FakeEngine) -> None:
    counted = client.responses.input_tokens.count(model="fake", input="hi")
    client.responses.create(model="fake", input="hi")
    assert counted.input_tokens == len(engine.requests[-1].prompt)
