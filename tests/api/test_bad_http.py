"""Bytes that are no HTTP, or too much of it: over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from app.api.bad_http import MAX_HEAD_BYTES
from app.api.options import ApiOptions
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.api.support import CHAT, HI
from tests.fakes.engine import FakeEngine

POST = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\n".encode()


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live_server(FakeEngine(), ApiOptions(keepalive_s=0.05), loop=request.param) as server:
        server.engine.gate.open()
        yield server


def exchange(server: LiveServer, sent: bytes) -> bytes:
    """All that the server says to these bytes until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as peer:
        peer.sendall(sent)
        return b"".join(iter(lambda: peer.recv(65536), b""))


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of the only answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"\r\n\r\n") == 1 and b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
        POST + b"Content-Length: -3\r\n\r\n",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "http2", "method", "length", "two lengths", "chunk"],
)
def test_what_is_no_http_is_told_so(server: LiveServer, sent: bytes) -> None:
    status, error = refusal(exchange(server, sent))
    assert (status, error["code"], error["type"]) == (400, "invalid_http", "invalid_request_error")


@pytest.mark.parametrize(
    "head",
    [b"GET /health HTTP/1.1\r\nX: ", b"GET /", POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: "],
    ids=["header", "path", "trailer"],
)
def test_heads_without_an_end_are_refused(server: LiveServer, head: bytes) -> None:
    sent_bytes = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as peer:
        peer.sendall(head)
        try:
            while sent_bytes < 64 * MAX_HEAD_BYTES:
                sent_bytes += peer.send(b"a" * 16384)
        except ConnectionError:
            return
    pytest.fail(f"the server took {sent_bytes} bytes")


def test_long_bodies_are_no_heads(server: LiveServer) -> None:
    """However large, however cut, and whatever comes behind on the same connection."""
    body = json.dumps({"messages": HI, "max_tokens": 1, "foo": "x" * (3 * MAX_HEAD_BYTES)}).encode()
    one = POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (body[:-9], body[-9:]))
    last = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    assert exchange(server, one + one + last).count(b"HTTP/1.1 200") == 3


def test_nothing_is_said_into_an_answer(server: LiveServer) -> None:
    server.engine.gate.close()
    stream = server.post(CHAT, {"messages": HI, "max_tokens": 9, "stream": True})
    stream.read_until(b'"role"')
    stream.socket.sendall(b"\x00\x01\x02\r\n\r\n")
    assert stream.read_all().count(b"HTTP/1.1") == 1
