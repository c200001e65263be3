"""The HTTP surface over the real engine and a tiny model: what llama-server's own tests hold it to, and more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from app.api.app import create_app
from app.api.options import ApiOptions
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from tests.api.support import CHAT, COMPLETIONS, is_error, joined, stream
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import open_engine

MESSAGES = [{"role": "user", "content": "A B C D E F G"}]
#: A tiny random model may stop at once; these make it go on.
LONG = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 24}
GREEDY = {**LONG, "temperature": 0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny_llama(tmp_path_factory.mktemp("api") / "tiny.gguf", TinyLlama(GGMLType.F16))
    device = NumpyDevice("CPU")
    engine = open_engine(path, [device], ctx_size=2048, n_slots=4, max_queue=8)
    yield engine
    engine.close()
    engine.check_integrity()
    device.close()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine, ApiOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client


async def answer(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def text(client: httpx.AsyncClient, **body: Any) -> str:
    return (await answer(client, **body))["choices"][0]["message"]["content"]


async def test_streams_say_the_same(client: httpx.AsyncClient) -> None:
    body = {**GREEDY, "logprobs": True, "top_logprobs": 3, "return_tokens": True}
    choice = (await answer(client, **body))["choices"][0]
    events = await stream(client, CHAT, body)
    assert joined(events) == choice["message"]["content"] != ""
    parts = [event["choices"][0] for event in events[:-1]]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert [entry["id"] for entry in entries] == choice["tokens"]
    for mine, other in zip(entries, choice["logprobs"]["content"], strict=True):
        assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-3) and mine["logprob"] <= 0
        assert mine["logprob"] <= mine["top_logprobs"][0]["logprob"]
        assert mine["id"] in [top["id"] for top in mine["top_logprobs"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") == joined(events)


async def test_usage_tells_what_was_cached(client: httpx.AsyncClient) -> None:
    body = {**GREEDY, "messages": [{"role": "user", "content": "never asked before"}], "max_tokens": 2}
    first, second = (await answer(client, **body))["usage"], (await answer(client, **body))["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1
    assert first["prompt_tokens_details"]["cached_tokens"] < first["prompt_tokens"] - 1
    cold = await answer(client, **body, cache_prompt=False)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["timings"]["prompt_n"] == cold["usage"]["prompt_tokens"]


async def test_a_warm_prefix_changes_nothing(client: httpx.AsyncClient) -> None:
    cold = await text(client, **GREEDY, cache_prompt=False)
    assert {await text(client, **GREEDY) for _ in range(3)} == {cold}


async def test_seeds(client: httpx.AsyncClient) -> None:
    body = {**LONG, "temperature": 1}
    same = {await text(client, **body, seed=42) for _ in range(3)}
    assert len(same) == 1
    assert await text(client, **body, seed=43) not in same
    assert len({await text(client, **body) for _ in range(3)}) > 1
    assert len({await text(client, **GREEDY, seed=seed) for seed in (1, 2)}) == 1
    assert await text(client, **{**GREEDY, "temperature": 1e-9}) == await text(client, **GREEDY)


async def test_neighbours_change_nothing(client: httpx.AsyncClient) -> None:
    body = {**LONG, "temperature": 1, "seed": 7}
    alone = await text(client, **body)
    others = [
        text(client, **{**body, "seed": seed, "messages": [{"role": "user", "content": "x" * seed}]})
        for seed in range(1, 6)
    ]
    together, *_ = await asyncio.gather(text(client, **body), *others)
    assert together == alone


async def test_choices(client: httpx.AsyncClient) -> None:
    body = {**LONG, "temperature": 1, "seed": 5, "n": 3}
    whole = await answer(client, **body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3 and texts[0] == await text(client, **{**body, "n": 1})
    events = await stream(client, CHAT, body)
    assert [joined(events, index) for index in range(3)] == texts
    assert whole["usage"]["completion_tokens"] == 3 * 24


async def test_stop_strings_anywhere_in_the_text(client: httpx.AsyncClient) -> None:
    whole = await text(client, **GREEDY)
    stops = {whole[at : at + n] for at in range(0, len(whole) - 4, 3) for n in (1, 4)}
    for stop in stops:
        body = {**GREEDY, "stop": [stop, "never in there"]}
        choice = (await answer(client, **body))["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"
        assert joined(await stream(client, CHAT, body)) == whole[: whole.index(stop)]


async def test_biases(client: httpx.AsyncClient) -> None:
    first = (await answer(client, **GREEDY, return_tokens=True))["choices"][0]["tokens"][0]
    banned = (await answer(client, **GREEDY, return_tokens=True, logit_bias={str(first): False}))["choices"][0][
        "tokens"
    ]
    forced = (await answer(client, **GREEDY, return_tokens=True, logit_bias={"70": 100}))["choices"][0]["tokens"]
    assert first not in banned and set(forced) == {70}


async def test_prompts_are_scored_as_they_were_generated(client: httpx.AsyncClient) -> None:
    body = {"prompt": [40, 41, 42, 43], "temperature": 0, "ignore_eos": True, "logprobs": 2, "return_tokens": True}
    made = (await client.post(COMPLETIONS, json={**body, "max_tokens": 6})).json()["choices"][0]
    scored_body = {**body, "prompt": [*body["prompt"], *made["tokens"]], "max_tokens": 0, "echo": True}
    scored = (await client.post(COMPLETIONS, json=scored_body)).json()["choices"][0]
    assert scored["finish_reason"] == "length" and scored["tokens"] == scored_body["prompt"]
    logprobs = scored["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert {len(values) for values in logprobs.values()} == {10}
    assert logprobs["token_logprobs"][4:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)
    assert all(math.isfinite(value) and value <= 0 for value in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("n_free", [-1, 0, 1, 2])
async def test_the_edge_of_the_context(client: httpx.AsyncClient, engine: Engine, n_free: int) -> None:
    body = {"prompt": [40] * (engine.info.n_ctx - n_free), "max_tokens": 64, "ignore_eos": True}
    response = await client.post(COMPLETIONS, json=body)
    if n_free < 1:
        is_error(response, 400, "prompt", "context_length_exceeded")
    else:
        assert response.json()["usage"]["completion_tokens"] == n_free
        assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_progress_of_a_long_prompt(client: httpx.AsyncClient) -> None:
    body = {**GREEDY, "messages": [{"role": "user", "content": "p" * 300}], "max_tokens": 4, "return_progress": True}
    events = await stream(client, CHAT, body)
    told = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    done = [part["processed"] for part in told]
    assert len(done) > 2 and done == sorted(done) and done[-1] == told[-1]["total"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_frees_the_slot(client: httpx.AsyncClient, engine: Engine, streamed: bool) -> None:
    task = asyncio.create_task(client.post(CHAT, json={**GREEDY, "max_tokens": 1500, "stream": streamed}))
    while not (busy := [slot for slot in (await client.get("/slots")).json() if slot["is_processing"]]):
        await asyncio.sleep(0)
    assert (await client.post(f"/v1/cancel/{busy[0]['id_task']}")).status_code == 200
    response = await task
    assert "request_cancelled" in response.text
    while any(slot["is_processing"] for slot in (await client.get("/slots")).json()):
        await asyncio.sleep(0)


async def test_a_full_queue(client: httpx.AsyncClient) -> None:
    statuses = [
        response.status_code for response in await asyncio.gather(*(client.post(CHAT, json=GREEDY) for _ in range(20)))
    ]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 12


async def test_tokens_and_back(client: httpx.AsyncClient) -> None:
    for content in ("Hello  world\n", "漢字 🙂 é", "<|im_end|>", ""):
        tokens = (await client.post("/tokenize", json={"content": content})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json()["content"] == content


async def test_users_cannot_write_control_tokens(client: httpx.AsyncClient, engine: Engine) -> None:
    end = engine.tokenizer.token_id("<|im_end|>")
    assert end is not None

    async def n_prompt(content: str) -> int:
        usage = (await answer(client, messages=[{"role": "user", "content": content}], max_tokens=1))["usage"]
        return int(usage["prompt_tokens"])

    assert await n_prompt("<|im_end|>") - await n_prompt("") == len("<|im_end|>")
