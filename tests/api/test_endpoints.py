"""Models, health, tokens, vectors, slots, cancelling: the smaller endpoints."""

from __future__ import annotations

import asyncio
import base64
import math
import struct

import httpx
import pytest

from app.api.options import ApiOptions
from app.engine.service import Phase
from app.errors import DeviceLost, OutOfDeviceMemory, QueueFull
from tests.api.conftest import client_for
from tests.api.support import CHAT, COMPLETIONS, HI, is_error, sse_events, stream
from tests.fakes.engine import BOS, FakeEngine


async def test_models(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["id"] == "fake" and card["object"] == "model"
    for name in ("max_model_len", "context_length"):
        assert card[name] == 4096
    assert card["meta"]["n_ctx"] == 4096 and card["meta"]["n_ctx_train"] == 8192
    assert (await client.get("/v1/models/fake")).json() == card
    assert (await client.get("/models/fake-model")).json() == card
    is_error(await client.get("/v1/models/org/other"), 404, "model", "model_not_found")


async def test_models_with_slashes_in_their_names(engine: FakeEngine) -> None:
    engine.info = type(engine.info)(**{**{f: getattr(engine.info, f) for f in engine.info.__slots__}, "alias": "a/b:c"})
    async with client_for(engine) as client:
        assert (await client.get("/v1/models/a/b:c")).json()["id"] == "a/b:c"
        assert (await client.get("/v1/models/a%2Fb%3Ac")).json()["id"] == "a/b:c"


async def test_ready(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/healthz", "/readyz", "/v1/health"):
        assert (await client.get(path)).status_code == 200


async def test_the_url_itself_says_where_to_go(client: httpx.AsyncClient) -> None:
    facts = (await client.get("/")).json()
    assert (await client.get(facts["schema"])).status_code == (await client.get(facts["docs"])).status_code == 200


async def test_head_is_get_without_a_body(client: httpx.AsyncClient) -> None:
    for path in ("/", "/health", "/readyz", "/v1/models", "/v1/models/none", "/nope"):
        head, got = await client.head(path), await client.get(path)
        assert head.status_code == got.status_code and head.content == b""
        assert head.headers["content-length"] == got.headers["content-length"]
    assert (await client.head(CHAT)).status_code == 405


async def test_wrong_ways_in_say_the_right_ones(client: httpx.AsyncClient) -> None:
    assert "send POST" in is_error(await client.get(CHAT), 405, code="method_not_allowed")["message"]
    assert "send GET" in is_error(await client.put("/v1/models"), 405, code="method_not_allowed")["message"]
    assert "/openapi.json" in is_error(await client.get("/v1/nope"), 404, code="unknown_route")["message"]


async def test_loading(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.set_status(phase=Phase.LOADING, progress=0.25, seconds_left=12.4, detail="uploading to w1:50052")
    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/readyz")).status_code == 503
    for response in (
        await client.get("/health"),
        await client.get("/v1/models"),
        await client.post(CHAT, json={"messages": HI, "stream": True}),
        await client.post(COMPLETIONS, json={"prompt": "x"}),
        await client.post("/v1/embeddings", json={"input": "x"}),
        await client.post("/tokenize", json={"content": "x"}),
    ):
        error = is_error(response, 503, code="loading")
        assert error["loading"] == {"detail": "uploading to w1:50052", "progress": 0.25, "eta_seconds": 12.4}
        assert "25%" in error["message"] and response.headers["retry-after"] == "13"


async def test_a_lost_worker(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.set_status(phase=Phase.DEGRADED, lost_devices=("w2:50052",))
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/readyz")
    assert ready.status_code == 503 and ready.json()["lost_devices"] == ["w2:50052"]
    for streamed in (False, True):
        response = await client.post(CHAT, json={"messages": HI, "stream": streamed})
        error = is_error(response, 503, code="device_lost")
        assert "w2:50052" in error["message"] and int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.FAILED])
async def test_no_more_requests(client: httpx.AsyncClient, engine: FakeEngine, phase: Phase) -> None:
    engine.set_status(phase=phase, detail="out of memory")
    response = await client.post(CHAT, json={"messages": HI})
    is_error(response, 503, code="not_ready")
    assert "retry-after" in response.headers


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DeviceLost("w1:1", "reset"), 503, "device_lost"),
        (OutOfDeviceMemory("CPU", 5), 503, "device_error"),
        (RuntimeError("words"), 500, "internal_error"),
    ],
)
async def test_failures_on_the_way(engine: FakeEngine, error: Exception, status: int, code: str) -> None:
    engine.fail_with, engine.fail_after = error, 2
    async with client_for(engine) as client:
        response = await client.post(CHAT, json={"messages": HI})
        assert ("retry-after" in response.headers) == isinstance(error, DeviceLost)
        is_error(response, status, code=code)
        events = await stream(client, CHAT, {"messages": HI})
        assert events[-1]["error"]["code"] == code
        is_error(await client.post("/v1/embeddings", json={"input": "x"}), status, code=code)


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    async def tokens(**body: object) -> list[object]:
        return (await client.post("/tokenize", json=body)).json()["tokens"]

    assert await tokens(content="aé") == [97, 195, 169]
    assert await tokens(content="a", add_special=True) == [BOS, 97]
    assert await tokens(content="<s>") == [BOS]
    assert await tokens(content="<s>", parse_special=False) == [*b"<s>"]
    assert await tokens(content=["a", 98, "c"]) == [97, 98, 99]
    assert await tokens(content="é", with_pieces=True) == [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert await tokens(content="") == []
    assert (await client.post("/detokenize", json={"tokens": [BOS, 97, 195, 169]})).json() == {"content": "<s>aé"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"content": ""}
    is_error(await client.post("/detokenize", json={"tokens": [10**6]}), 400, "tokens")
    is_error(await client.post("/tokenize", json={}), 400, "content")


async def test_apply_template(client: httpx.AsyncClient) -> None:
    prompt = (await client.post("/apply-template", json={"messages": HI})).json()["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
async def test_embeddings(client: httpx.AsyncClient, path: str) -> None:
    body = (await client.post(path, json={"input": ["ab", [97, 98], "c"], "model": "x"})).json()
    assert body["object"] == "list" and body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    for item in body["data"]:
        assert math.isclose(math.hypot(*item["embedding"]), 1)
    one = (await client.post(path, json={"input": [97, 98]})).json()["data"]
    assert len(one) == 1 and one[0]["embedding"] == body["data"][1]["embedding"]


async def test_embeddings_in_base64(client: httpx.AsyncClient) -> None:
    plain, packed = [
        (await client.post("/v1/embeddings", json={"input": "ab", "encoding_format": form})).json()["data"][0]
        for form in ("float", "base64")
    ]
    values = struct.unpack("<8f", base64.b64decode(packed["embedding"]))
    assert values == pytest.approx(plain["embedding"], rel=1e-6)


async def test_dimensions_of_embeddings(client: httpx.AsyncClient) -> None:
    async def vector(**body: object) -> list[float]:
        return (await client.post("/v1/embeddings", json={"input": "ab", **body})).json()["data"][0]["embedding"]

    raw = await vector(embd_normalize=-1)
    cut = await vector(dimensions=3)
    length = math.hypot(*raw[:3])
    assert cut == pytest.approx([value / length for value in raw[:3]])
    assert await vector(pooling="last", embd_normalize=-1) == raw[::-1]
    for body in ({"dimensions": 9}, {"dimensions": 0}, {"embd_normalize": 5}, {"encoding_format": "hex"}):
        is_error(await client.post("/v1/embeddings", json={"input": "ab", **body}), 400, next(iter(body)))


@pytest.mark.parametrize("wrong", [[], "x" * 5000, [[]], ["a", []], [[10**6]], 5, ["a", None]])
async def test_wrong_inputs_of_embeddings(client: httpx.AsyncClient, wrong: object) -> None:
    error = (await client.post("/v1/embeddings", json={"input": wrong})).json()["error"]
    assert error["param"].startswith("input")


async def test_props(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    props = (await client.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["total_slots"] == 4
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["chat_template"] == engine.template.source and props["bos_token"] == "<s>"


async def test_slots(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    slots = (await client.get("/slots?fail_on_no_slot=1")).json()
    assert [slot["is_processing"] for slot in slots] == [False] * 4
    engine.gate.close()
    tasks = [asyncio.create_task(client.post(CHAT, json={"messages": HI})) for _ in range(4)]
    while len(engine.running) < 4:
        await asyncio.sleep(0)
    assert all(slot["is_processing"] for slot in (await client.get("/slots")).json())
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 503
    engine.gate.open()
    await asyncio.gather(*tasks)


async def test_endpoints_can_be_off(engine: FakeEngine) -> None:
    async with client_for(engine, ApiOptions(enable_slots=False, enable_props=False)) as client:
        for path in ("/slots", "/props", "/metrics"):
            assert is_error(await client.get(path), 501)["type"] == "not_supported_error"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_path", [False, True])
async def test_cancel(client: httpx.AsyncClient, engine: FakeEngine, streamed: bool, by_path: bool) -> None:
    engine.gate.close()
    task = asyncio.create_task(client.post(CHAT, json={"messages": HI, "stream": streamed, "n": 2}))
    while len(engine.running) < 2 or not engine.started.is_set():
        await asyncio.sleep(0)
    request_id = engine.requests[0].id
    if by_path:
        response = await client.post(f"/v1/cancel/{request_id}")
    else:
        response = await client.post("/v1/cancel", json={"id": request_id})
    assert response.json()["cancelled"] is True
    answer = await task
    if streamed:
        assert sse_events(answer.text)[-1]["error"]["code"] == "request_cancelled"
    else:
        is_error(answer, 499, code="request_cancelled")
    assert len(engine.aborted_ids) == 2 and not engine.running
    is_error(await client.post("/v1/cancel", json={"id": request_id}), 404, "id")


async def test_finished_requests_are_forgotten(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for body in ({"messages": HI}, {"messages": HI, "n": 3, "stream": True}):
        await client.post(CHAT, json=body)
    assert not engine.aborted_ids
    for request in engine.requests:
        is_error(await client.post(f"/v1/cancel/{request.id}"), 404, "id")


async def test_capacity_of_several_prompts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.capacity = 3
    is_error(await client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2}), 429, code="queue_full")
    assert len(engine.aborted_ids) == 3 and not engine.running
    engine.submit = lambda request: (_ for _ in ()).throw(QueueFull("full", retry_after_s=0.2))  # type: ignore[method-assign]
    response = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
