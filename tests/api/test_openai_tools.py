"""The openai package with tools and with answers of a given form, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from app.api.options import ApiOptions
from tests.api.live import WAIT_S, live_server
from tests.api.test_tools import HERMES, TOOLS, TWO, WANTED, told
from tests.fakes.engine import FakeEngine

HI: list[Any] = [{"role": "user", "content": "hi"}]


class Point(BaseModel):
    x: int
    label: str


def reply(request: Any) -> str:
    return '{"x": 3, "label": "a"}' if request.constraint is not None else TWO


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        live_server(FakeEngine(template=HERMES, reply=reply), ApiOptions()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, timeout=WAIT_S) as client,
    ):
        yield client


def test_tools(client: openai.OpenAI) -> None:
    tools: Any = TOOLS
    choice = client.chat.completions.create(model="fake", messages=HI, tools=tools).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    assert told([call.model_dump() for call in choice.message.tool_calls]) == WANTED
    again = [*HI, choice.message.model_dump(exclude_none=True)]
    again += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in choice.message.tool_calls]
    assert client.chat.completions.create(model="fake", messages=again, tools=tools).choices


def test_streamed_tools(client: openai.OpenAI) -> None:
    tools: Any = TOOLS
    with client.chat.completions.stream(model="fake", messages=HI, tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [(event.index, event.name) for event in done] == [(0, "add"), (1, "time")]
    assert message.tool_calls is not None and told([call.model_dump() for call in message.tool_calls]) == WANTED


def test_parsed_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="fake", messages=HI, response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=3, label="a")
