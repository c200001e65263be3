"""LangChain's agents against a real server, in OpenAI's dialect and in Anthropic's: tools, streams, answers of a form.

Skips where the packages are absent; `tandem-llm[clients]` brings them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from app.api.options import ApiOptions
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.api.test_tools import HERMES, TWO
from tests.fakes.engine import FakeEngine

KEY = "sesame"
ANSWER = "Hello from the fake engine."

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # what these packages warn of is theirs
]


class Point(BaseModel):
    """A point with a label."""

    x: int
    label: str


def reply(request: Any) -> str:
    """What the last turn asks for."""
    text = bytes(token for token in request.prompt if token < 256).decode("utf-8", "replace")
    if '"Point"' in text:
        return '<tool_call>\n{"name": "Point", "arguments": {"x": 3, "label": "a"}}\n</tool_call>'
    if "form" in text:
        return '{"x": 3, "label": "a"}'
    if "tool\n" in text:
        return "It is 5."
    return TWO if "call" in text.rsplit("user\n", 1)[1] else ANSWER


@pytest.fixture(scope="module", autouse=True)
def no_leaks() -> None:
    """Instead of the check of that name: these packages keep threads and sockets as long as they live."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(template=HERMES, reply=reply), ApiOptions(api_keys=(KEY,))) as server:
        yield server


@pytest.fixture(params=["openai", "responses", "anthropic"])
def model(request: pytest.FixtureRequest, server: LiveServer) -> Any:
    options = {"model": "fake", "api_key": KEY, "max_retries": 0, "timeout": WAIT_S}
    if request.param == "anthropic":
        langchain_anthropic = pytest.importorskip("langchain_anthropic")
        return langchain_anthropic.ChatAnthropic(base_url=server.url, max_tokens=1000, **options)
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", use_responses_api=request.param == "responses", stream_usage=True, **options
    )


def text_of(message: Any) -> str:
    return message.content if isinstance(message.content, str) else str(message.text)


def test_invoke(model: Any) -> None:
    message = model.invoke("hi")
    assert text_of(message) == ANSWER and message.usage_metadata["output_tokens"] == len(ANSWER)


def test_stream(model: Any) -> None:
    whole = None
    for chunk in model.stream([("system", "Be brief."), ("human", "hi")]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and text_of(whole) == ANSWER
    assert whole.usage_metadata["output_tokens"] == len(ANSWER)


def test_streamed_calls(model: Any) -> None:
    whole = None
    for chunk in model.bind_tools([add, time]).stream("call"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [
        ("add", {"a": 2, "b": 3}),
        ("time", {"zone": "UTC"}),
    ]


def test_form(model: Any) -> None:
    assert model.with_structured_output(Point).invoke("form") == Point(x=3, label="a")


def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


def time(zone: str) -> str:
    """Tells the time."""
    return "noon"


@pytest.mark.parametrize("run", ["invoke", "stream"])
def test_agent(model: Any, run: str) -> None:
    create_agent: Callable[..., Any] = pytest.importorskip("langchain.agents").create_agent
    agent = create_agent(model, [add, time])
    asked = {"messages": [("human", "call")]}
    if run == "invoke":
        messages = agent.invoke(asked)["messages"]
    else:
        messages = list(agent.stream(asked, stream_mode="values"))[-1]["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "tool", "ai"]
    assert [message.content for message in messages if message.type == "tool"] == ["5", "noon"]
    assert text_of(messages[-1]) == "It is 5."
