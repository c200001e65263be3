"""Clients that go away, wait long, or stop sending: over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from app.api.options import ApiOptions
from tests.api.live import WAIT_S, LiveServer, RawExchange, live_server
from tests.api.support import CHAT, HI
from tests.fakes.engine import FakeEngine

GO_AWAY = {"fin": RawExchange.close, "rst": RawExchange.reset}
LONG = {"messages": HI, "temperature": 0}


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live_server(FakeEngine(), ApiOptions(keepalive_s=0.05), loop=request.param) as server:
        yield server


@pytest.fixture
def engine(server: LiveServer) -> Iterator[FakeEngine]:
    engine = server.engine
    engine.gate.close()
    engine.abort_seen.clear()
    engine.started.clear()
    engine.aborted_ids.clear()
    engine.reply = lambda request: "x" * 2000
    yield engine
    engine.gate.open()


@pytest.mark.parametrize("go_away", GO_AWAY.values(), ids=GO_AWAY)
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream(
    server: LiveServer, engine: FakeEngine, go_away: Callable[[RawExchange], None], n: int
) -> None:
    exchange = server.post(CHAT, {**LONG, "stream": True, "n": n})
    engine.gate.step(3 * n)
    exchange.read_until(b'"content":"x"')
    go_away(exchange)
    assert engine.abort_seen.wait(WAIT_S)
    assert engine.idle() and len(set(engine.aborted_ids)) == n


@pytest.mark.parametrize("go_away", GO_AWAY.values(), ids=GO_AWAY)
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_while_the_whole_answer_is_made(
    server: LiveServer, engine: FakeEngine, go_away: Callable[[RawExchange], None], n: int
) -> None:
    exchange = server.post(CHAT, {**LONG, "n": n})
    assert engine.started.wait(WAIT_S)
    go_away(exchange)
    assert engine.abort_seen.wait(WAIT_S)
    assert engine.idle() and len(set(engine.aborted_ids)) == n


def test_half_closed_streams_go_on(server: LiveServer, engine: FakeEngine) -> None:
    exchange = server.post(CHAT, {**LONG, "stream": True, "max_tokens": 3})
    exchange.read_until(b'"role"')
    exchange.half_close()
    exchange.read_until(b": keep-alive")
    engine.gate.open()
    assert exchange.read_all().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not engine.abort_seen.is_set()


def test_half_closed_requests_are_answered(server: LiveServer, engine: FakeEngine) -> None:
    exchange = server.post(CHAT, {**LONG, "max_tokens": 3})
    assert engine.started.wait(WAIT_S)
    exchange.half_close()
    exchange.read_until(b"100 Continue")
    engine.gate.open()
    interim, _, answer = exchange.read_all().rpartition(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n" * interim.count(b"100")
    assert answer.startswith(b"HTTP/1.1 200") and b'"content":"xxx"' in answer
    assert not engine.abort_seen.is_set()


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat"], ids=["nothing", "half-a-head"])
def test_a_client_that_ends_before_its_request_is_let_go(
    server: LiveServer, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as client:
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass
    assert "Traceback" not in caplog.text


def test_comments_while_it_is_quiet(server: LiveServer, engine: FakeEngine) -> None:
    exchange = server.post(CHAT, {**LONG, "stream": True, "max_tokens": 1})
    head = exchange.read_until(b": tandem\n\n")
    assert head.startswith(b"HTTP/1.1 200") and b"data:" not in head.partition(b": tandem")[0]
    exchange.read_until(b": keep-alive\n\n")
    engine.gate.open()
    exchange.read_until(b"[DONE]")
    exchange.close()
