"""Responses that follow others: over a bounded store, with the prefix kept warm, and clear words when one is gone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.api.options import ApiLimits, ApiOptions
from app.api.responses.store import ResponseStore, Stored
from app.api.schemas.responses import InputItem
from app.errors import InvalidParameter, NotFound
from tests.api.conftest import client_for
from tests.api.responses import ADD, HERMES, RESPONSES, called, events_of, respond
from tests.api.support import is_error
from tests.fakes.engine import FakeEngine


def stored(name: str, parent: Stored | None = None, n_chars: int = 0, status: str = "completed") -> Stored:
    item = InputItem(id=f"item_{name}", role="user", content=name + "x" * n_chars)
    return Stored(name, {"id": name, "status": status}, (item,), parent)


def texts(one: Stored) -> list[Any]:
    return [item.content for item in one.conversation()]


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(2, 1 << 20)
    for name in "abc":
        store.add(stored(name))
        store.get("a") if name != "c" else None
    assert [name for name in "abc" if name in store._known] == ["a", "c"]
    with pytest.raises(NotFound):
        store.get("b")


def test_a_conversation_outlives_the_responses_it_follows() -> None:
    store = ResponseStore(1, 1 << 20)
    a = stored("a")
    store.add(a)
    b = stored("b", a)
    store.add(b)
    assert len(store) == 1 and texts(store.get("b")) == ["a", "b"]
    both = store.size_bytes
    store.remove("b")
    assert both > 0 and store.size_bytes == 0


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 5000)
    last = None
    for i in range(20):
        last = stored(f"r{i}", last if i % 4 else None, 600)
        store.add(last)
        assert store.size_bytes <= 5000
    assert last is not None and len(store.get("r19").lineage()) == 4
    store.add(stored("big", n_chars=6000))
    assert len(store) == 0 and store.size_bytes == 0


def test_what_grows_after_it_was_given_up_takes_nothing() -> None:
    store = ResponseStore(1, 1 << 20)
    a = stored("a")
    store.add(a)
    store.add(stored("b"))
    size_bytes = store.size_bytes
    store.update(a, {"id": "a", "status": "completed"}, [InputItem(role="assistant", content="x" * 100)])
    assert store.size_bytes == size_bytes


def test_what_can_be_followed() -> None:
    store = ResponseStore(4, 1 << 20)
    store.add(stored("a", status="in_progress"))
    for name, code in (("a", "previous_response_not_complete"), ("z", "previous_response_not_found")):
        with pytest.raises(InvalidParameter) as caught:
            store.previous(name)
        assert caught.value.code == code


def prompt_of(engine: FakeEngine, at: int) -> str:
    text: str = engine.tokenizer.decode(engine.requests[at].prompt, show_special=True)
    return text


async def test_a_chain_says_what_the_whole_conversation_says() -> None:
    engine = FakeEngine(template=HERMES, reply=lambda request: "One." + called("add", {"a": 1}))
    async with client_for(engine) as client:
        first = await respond(client, input="hi", instructions="Once.", tools=[ADD])
        output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "5"}
        *_, last = await events_of(client, input=[output], previous_response_id=first["id"], tools=[ADD])
        second = last["response"]
        assert second["previous_response_id"] == first["id"]
        await respond(client, input="more", previous_response_id=second["id"], tools=[ADD], instructions="Again.")
        whole = [{"role": "user", "content": "hi"}, *first["output"], output, *second["output"]]
        more = {"role": "user", "content": "more"}
        await respond(client, input=[*whole, more], tools=[ADD], instructions="Again.")
    assert engine.requests[2].prompt == engine.requests[3].prompt
    assert "Once." in prompt_of(engine, 0) and "Once." not in prompt_of(engine, 1)
    assert prompt_of(engine, 2).count("One.") == 2


async def test_a_chain_goes_on_from_what_was_computed() -> None:
    engine = FakeEngine(template=HERMES, reply=lambda request: "Fine.")
    async with client_for(engine) as client:
        first = await respond(client, input="hi")
        await respond(client, input="and?", previous_response_id=first["id"])
    before, after = (engine.requests[i].prompt for i in (0, 1))
    answered = (*before, *b"Fine.")
    assert after[: len(answered)] == answered


async def test_stored_responses_are_shown_and_forgotten(client: httpx.AsyncClient) -> None:
    first = await respond(client, input="hi")
    url = f"{RESPONSES}/{first['id']}"
    assert (await client.get(url)).json() == first
    assert (await client.delete(url)).json() == {"id": first["id"], "object": "response", "deleted": True}
    for answer in (await client.get(url), await client.delete(url), await client.post(f"{url}/cancel")):
        is_error(answer, 404, "response_id", "response_not_found")
    body = {"input": "x", "previous_response_id": first["id"]}
    error = is_error(await client.post(RESPONSES, json=body), 400, "previous_response_id")
    assert error["code"] == "previous_response_not_found" and "input" in error["message"]
    is_error(await client.get(f"{RESPONSES}/{(await respond(client, input='hi'))['id']}?stream=true"), 400, "stream")


async def test_what_is_over_cannot_be_cancelled(client: httpx.AsyncClient) -> None:
    first = await respond(client, input="hi")
    assert (await client.post(f"{RESPONSES}/{first['id']}/cancel")).json() == first


async def test_nothing_is_kept_unasked(client: httpx.AsyncClient) -> None:
    first = await respond(client, input="hi", store=False)
    assert first["store"] is False
    is_error(await client.get(f"{RESPONSES}/{first['id']}"), 404, "response_id")


async def test_no_more_than_there_is_room_for(engine: FakeEngine) -> None:
    options = ApiOptions(limits=ApiLimits(stored_responses=2))
    async with client_for(engine, options) as client:
        ids = [(await respond(client, input="hi"))["id"] for _ in range(3)]
        statuses = [(await client.get(f"{RESPONSES}/{one}")).status_code for one in ids]
    assert statuses == [404, 200, 200]


async def test_input_items(client: httpx.AsyncClient) -> None:
    first = await respond(client, input=[{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}])
    second = await respond(client, input="c", previous_response_id=first["id"])
    url = f"{RESPONSES}/{second['id']}/input_items"
    listed = (await client.get(url, params={"order": "asc"})).json()
    assert [item["content"][0]["text"] for item in listed["data"]][:2] == ["a", "b"]
    assert [item["role"] for item in listed["data"]] == ["user", "developer", "assistant", "user"]
    assert listed["object"] == "list" and not listed["has_more"] and all(item["id"] for item in listed["data"])
    page = (await client.get(url, params={"limit": 2})).json()
    assert page["has_more"] and page["data"] == listed["data"][:1:-1]
    rest = (await client.get(url, params={"after": page["last_id"]})).json()
    assert rest["data"] == listed["data"][1::-1] and not rest["has_more"]
    is_error(await client.get(url, params={"after": "x"}), 400, "after")
    is_error(await client.get(url, params={"limit": 0}), 400, "limit")


async def test_references_to_items(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    first = await respond(client, input="hi")
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    await respond(client, input=[{"role": "user", "content": "hi"}, *references, {"role": "user", "content": "x"}])
    assert "Hello from the fake engine." in prompt_of(engine, 1)
