"""What tests of /v1/responses say often."""

from __future__ import annotations

import json
from typing import Any

import httpx

RESPONSES = "/v1/responses"

#: Shows tools, calls and thoughts as Qwen's does.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}{{ t | tojson }}{% endfor %}\n"
    "<tool_call>{{ '{' }}name, arguments{{ '}' }}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
FILES = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}],
}


def called(name: str, arguments: Any) -> str:
    """A call as HERMES has it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


async def respond(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["id"].startswith("resp_") and answer["object"] == "response"
    return answer


async def events_of(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed response, checked: numbered, named, each item opened, filled, closed in its turn."""
    response = await client.post(RESPONSES, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    check_order(events)
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *middle, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["status"] == second["response"]["status"] == "in_progress"
    assert last["type"] in ("response.completed", "response.incomplete", "response.failed")
    told = [check_item(item_events) for item_events in split_items(middle)]
    assert told == last["response"]["output"]


def split_items(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    items: list[list[dict[str, Any]]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append([])
        items[-1].append(event)
        assert event["output_index"] == len(items) - 1
    return items


def check_item(events: list[dict[str, Any]]) -> dict[str, Any]:
    """One item's events; returns the item as its last event tells it."""
    added, *middle, done = events
    item: dict[str, Any] = done["item"]
    assert done["type"] == "response.output_item.done" and added["item"]["status"] == "in_progress"
    assert added["item"]["id"] == item["id"] and added["item"]["type"] == item["type"]
    assert all(event["item_id"] == item["id"] for event in middle)
    deltas = [event for event in middle if event["type"].endswith(".delta")]
    text = "".join(event["delta"] for event in deltas)
    kind = deltas[0]["type"].removesuffix(".delta") if deltas else None
    parts = item.get("content") or item.get("summary")
    if parts:
        (part,) = parts
        part_kind = "response.content_part" if item.get("content") else "response.reasoning_summary_part"
        assert [event["type"] for event in (middle[0], *middle[-2:])] == [
            f"{part_kind}.added",
            middle[-2]["type"],
            f"{part_kind}.done",
        ]
        assert part["text"] == text == middle[-2]["text"] and middle[-1]["part"] == part
        assert kind in (None, middle[-2]["type"].removesuffix(".done"))
    else:
        name = "arguments" if item["type"] == "function_call" else "input"
        assert item[name] == text == middle[-1][name] and middle[-1]["type"] == f"{kind}.done"
    return item


def text_of(answer: dict[str, Any]) -> str:
    """The text that is meant for the reader."""
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


def without_ids(value: Any) -> Any:
    """A response with all that differs from one making to the next left out."""
    if isinstance(value, dict):
        gone = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {key: without_ids(item) for key, item in value.items() if key not in gone}
    return [without_ids(item) for item in value] if isinstance(value, list) else value
