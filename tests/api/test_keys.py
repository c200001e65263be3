"""Keys, CORS and request ids."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from app.api.auth import Keys
from app.api.options import ApiOptions
from tests.api.conftest import client_for
from tests.api.support import CHAT, HI, is_error
from tests.fakes.engine import FakeEngine

BODY = {"messages": HI, "max_tokens": 1}


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine, ApiOptions(api_keys=("k1", "k2é"))) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", b"Bearer k1")],
        [("authorization", b"bearer k1")],
        [("authorization", b"Bearer k1 ")],
        [("authorization", "Bearer k2é".encode())],
        [("authorization", "Bearer k2é".encode("latin-1"))],
        [("x-api-key", b"k1")],
        [("x-api-key", b"k1"), ("authorization", b"Bearer other")],
    ],
)
async def test_right_keys(client: httpx.AsyncClient, headers: list[tuple[str, bytes]]) -> None:
    response = await client.post(CHAT, json=BODY, headers=[(name.encode(), value) for name, value in headers])
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", b"Bearer k2")],
        [("authorization", b"Bearer")],
        [("authorization", b"Bearer ")],
        [("authorization", b"k1")],
        [("authorization", b"Basic k1")],
        [("authorization", b"Bearer \xff\xfe")],
        [("authorization", b"Bearer k1"), ("authorization", b"Bearer k1")],
        [("x-api-key", b"")],
    ],
)
async def test_wrong_keys(client: httpx.AsyncClient, headers: list[tuple[str, bytes]]) -> None:
    raw = [(name.encode(), value) for name, value in [*headers, ("origin", b"http://app.test")]]
    response = await client.post(CHAT, json={**BODY, "stream": True}, headers=raw)
    is_error(response, 401, code="invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/healthz", "/readyz"])
async def test_probes_need_no_key(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


async def test_the_rest_needs_one(client: httpx.AsyncClient) -> None:
    is_error(await client.get("/v1/models"), 401)
    is_error(await client.get("/nope"), 401)


async def test_preflight_without_a_key(client: httpx.AsyncClient) -> None:
    headers = {
        "Origin": "http://app.test",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = await client.options(CHAT, headers=headers)
    assert response.status_code in (200, 204)
    assert response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in response.headers


async def test_streams_have_cors_headers(client: httpx.AsyncClient) -> None:
    headers = {"Origin": "http://app.test", "x-api-key": "k1"}
    response = await client.post(CHAT, json={**BODY, "stream": True}, headers=headers)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"


async def test_origins_can_be_named(engine: FakeEngine) -> None:
    async with client_for(engine, ApiOptions(cors_origins=("http://a.test",))) as client:
        ours = await client.get("/health", headers={"Origin": "http://a.test"})
        other = await client.get("/health", headers={"Origin": "http://b.test"})
    assert ours.headers["access-control-allow-origin"] == "http://a.test"
    assert "access-control-allow-origin" not in other.headers


async def test_keys_are_not_logged(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await client.post(CHAT, json=BODY, headers={"authorization": "Bearer sesame-open"})
    await client.post(CHAT, json=BODY, headers={"x-api-key": "k1"})
    assert "sesame-open" not in caplog.text and "k1" not in caplog.text


async def test_request_ids(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/nope"):
        assert (await client.get(path, headers={"X-Request-Id": "mine-1"})).headers["x-request-id"] == "mine-1"
    fresh = {(await client.get("/health")).headers["x-request-id"] for _ in range(2)}
    assert len(fresh) == 2
    for unfit in (b"a\xff", b"x" * 129, b""):
        response = await client.get("/health", headers=[(b"x-request-id", unfit)])
        assert response.headers["x-request-id"].startswith("req_")


async def test_a_bug_is_answered_with_cors_headers(engine: FakeEngine) -> None:
    engine.status = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    async with client_for(engine) as client:
        response = await client.get("/health", headers={"Origin": "http://app.test", "X-Request-Id": "r"})
    is_error(response, 500, code="internal_error")
    assert "division" not in response.text
    assert response.headers["access-control-allow-origin"] == "*" and response.headers["x-request-id"] == "r"


def test_no_keys_means_no_door() -> None:
    assert not Keys(())
    assert Keys(("a",)).accept([b"b", b"a"])
    assert not Keys(("a",)).accept([b"", b"aa"])
