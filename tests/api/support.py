"""What tests of the API say often."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
#: For errors whose field does not matter.
ANY_PARAM = "*"
HI = [{"role": "user", "content": "hi"}]


def is_error(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Check the envelope; returns the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in response.text
    assert param == ANY_PARAM or error["param"] == param, error
    if code is not None:
        assert error["code"] == code
    return error


def sse_events(text: str) -> list[Any]:
    """The events of a stream, `[DONE]` as that string; comments are left out. Checks the framing."""
    events: list[Any] = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a streamed answer."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return sse_events(response.text)


def joined(events: list[Any], index: int = 0, name: str = "content") -> str:
    """The text of one choice of a chat stream."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get(name, "") for choice in choices if choice["index"] == index)
