"""Bodies above the limit: a client that sends everything before it reads still gets to read why not."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from app.api.options import ApiLimits, ApiOptions
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.api.support import CHAT, HI
from tests.fakes.engine import FakeEngine

LIMIT_BYTES, BODY_BYTES = 1 << 20, 24 << 20


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    options = ApiOptions(limits=ApiLimits(body_bytes=LIMIT_BYTES))
    with live_server(FakeEngine(), options, loop=request.param) as server:
        yield server


def read_refusal(client: http.client.HTTPConnection) -> None:
    response = client.getresponse()
    error = json.loads(response.read())["error"]
    assert (response.status, error["code"]) == (413, "body_too_large")
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size_bytes", [LIMIT_BYTES + 1, BODY_BYTES])
def test_the_refusal_arrives(server: LiveServer, announced: bool, size_bytes: int) -> None:
    body = b"x" * size_bytes
    pieces = iter([body[at : at + 65536] for at in range(0, size_bytes, 65536)])
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as client:
        client.request("POST", CHAT, body if announced else pieces, encode_chunked=not announced)
        read_refusal(client)
        client.request("POST", CHAT, json.dumps({"messages": HI}))
        with client.getresponse() as response:
            assert response.status == 200 and response.read()


def test_the_refusal_comes_before_the_rest_of_the_body(server: LiveServer) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as client:
        client.putrequest("POST", CHAT)
        client.putheader("Content-Length", str(BODY_BYTES))
        client.endheaders(b"x")
        read_refusal(client)
