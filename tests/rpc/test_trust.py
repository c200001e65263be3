"""A worker with a token serves those who hold it, and nobody else gets further than a refusal that can be read."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import AccessDenied, ConfigError
from app.rpc.connect import connect
from app.rpc.endpoint import Timeouts
from app.rpc.token import Nonces, Role, Token
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.adder import Adder
from tests.rpc.raw import RawClient, frame
from tests.rpc.workers import QUICK, connected, tcp_worker, wait_until

SECRET = b"correct horse battery staple"
TOKEN = Token(SECRET)
CHALLENGE, PROVE, DEVICE_COUNT, PING, NOTICE = 128, 136, 15, 135, (1 << 64) - 1


@pytest.fixture
def guarded() -> Iterator[Worker]:
    with tcp_worker(Adder(), settings=WorkerSettings(token=TOKEN, hello_s=30)) as worker:
        yield worker


def endpoint(worker: Worker) -> str:
    return f"127.0.0.1:{worker.port}"


def test_holders_of_the_token_are_served_heartbeats_included(guarded: Worker) -> None:
    timeouts = Timeouts(heartbeat_s=0.02, patience_s=10)
    (device,) = connect(endpoint(guarded), timeouts=timeouts, token=Token(SECRET))
    buffer = device.alloc(64)
    device.write(buffer, 0, b"x" * 64)
    assert bytes(device.read(buffer, 0, 64).result(10)) == b"x" * 64
    pulse = device.link.heartbeat
    assert pulse is not None
    wait_until(lambda: pulse._pulse.counters.commands["PING"] > 2)
    device.memory()
    device.close()


def test_another_token_is_refused_readably(guarded: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        AccessDenied, match=r"127.0.0.1:\d+: the worker says: the client's token is not the one of this"
    ):
        connect(endpoint(guarded), timeouts=QUICK, token=Token(b"another token of some length"))
    assert SECRET.decode() not in caplog.text


def test_no_token_is_refused_readably(guarded: Worker) -> None:
    with pytest.raises(AccessDenied, match="^no access to worker .*; start a Tandem client with --rpc-token-file"):
        connect(endpoint(guarded), timeouts=QUICK)


@pytest.mark.parametrize("command", [DEVICE_COUNT, PING, 0, 129])
def test_strangers_are_told_why_and_hung_up_on(guarded: Worker, command: int) -> None:
    body = {DEVICE_COUNT: b"", PING: bytes(8), 0: bytes(12), 129: b""}[command]
    with RawClient(guarded.port) as stock:
        stock.tell(command, body)
        assert struct.unpack("<Q", stock._exactly(8))[0] == NOTICE
        (length,) = struct.unpack("<I", stock._exactly(4))
        assert b"not shown the token" in stock._exactly(length)
        assert stock.is_closed()


def test_proofs_are_good_once_and_for_one_role(guarded: Worker) -> None:
    own = bytes(32)
    with RawClient(guarded.port) as first, RawClient(guarded.port) as second:
        demanded, theirs = struct.unpack("<B32s", first.ask(CHALLENGE, own))
        _, others = struct.unpack("<B32s", second.ask(CHALLENGE, own))
        assert demanded == 1 and theirs != others
        proof = TOKEN.proof(Role.CLIENT, Nonces(own, theirs))
        assert first.ask(PROVE, proof) == TOKEN.proof(Role.WORKER, Nonces(own, theirs))
        assert first.ask(DEVICE_COUNT) == struct.pack("<I", 1)
        second.tell(PROVE, proof)  # overheard
        assert struct.unpack("<Q", second._exactly(8))[0] == NOTICE
    with RawClient(guarded.port) as third:
        _, theirs = struct.unpack("<B32s", third.ask(CHALLENGE, own))
        third.tell(PROVE, TOKEN.proof(Role.WORKER, Nonces(own, theirs)))
        assert struct.unpack("<Q", third._exactly(8))[0] == NOTICE


def test_a_proof_is_taken_once_and_only_after_a_challenge(guarded: Worker) -> None:
    with RawClient(guarded.port) as early:
        early.tell(PROVE, bytes(32))
        assert struct.unpack("<Q", early._exactly(8))[0] == NOTICE
    with RawClient(guarded.port) as twice:
        twice.ask(CHALLENGE, bytes(32))
        twice.tell(CHALLENGE, bytes(32))
        assert struct.unpack("<Q", twice._exactly(8))[0] == NOTICE


def test_long_messages_of_strangers_are_not_even_read(guarded: Worker) -> None:
    with RawClient(guarded.port) as stranger:
        stranger.send(frame(10, b"", size=1 << 20))  # a graph whose body never comes
        assert struct.unpack("<Q", stranger._exactly(8))[0] == NOTICE
        (length,) = struct.unpack("<I", stranger._exactly(4))
        assert b"allowed are 4 to 4096" in stranger._exactly(length)


def test_silent_strangers_are_hung_up_on() -> None:
    with (
        tcp_worker(Adder(), settings=WorkerSettings(token=TOKEN, hello_s=0.2)) as worker,
        RawClient(worker.port) as one,
    ):
        assert struct.unpack("<Q", one._exactly(8))[0] == NOTICE


def test_strangers_take_no_place_from_those_who_hold_the_token() -> None:
    settings = WorkerSettings(token=TOKEN, hello_s=60, max_clients=2)
    with tcp_worker(Adder(), settings=settings) as worker:
        strangers = [RawClient(worker.port) for _ in range(2)]
        wait_until(lambda: worker.n_clients == 2)
        (device,) = connect(endpoint(worker), timeouts=QUICK, token=TOKEN)
        device.memory()
        for stranger in strangers:
            assert stranger.is_closed()
            stranger.sock.close()
        device.close()


def test_a_client_with_a_token_is_served_where_none_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), tcp_worker(Adder()) as worker:
        (device,) = connect(endpoint(worker), timeouts=QUICK, token=TOKEN)
        device.memory()
        device.close()
    assert caplog.text.count("asks for no token") == 1  # although there are two connections


def test_a_worker_that_only_pretends_to_have_the_token_is_refused() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(struct.pack("<Q4B24s", 28, 7, 0, 0, 0x54, bytes(24)))
            sock.recv(4096)
            sock.sendall(struct.pack("<QB32s", 33, 1, bytes(32)))
            sock.recv(4096)
            sock.sendall(struct.pack("<Q32s", 32, bytes(32)))
            sock.recv(1)

    thread = threading.Thread(target=pretend)
    thread.start()
    with listener, pytest.raises(AccessDenied, match="does not hold the token itself"):
        connect(f"127.0.0.1:{listener.getsockname()[1]}", timeouts=QUICK, token=TOKEN)
    thread.join()


def test_nobody_shows_the_token_to_a_stock_worker(caplog: pytest.LogCaptureFixture) -> None:
    with tcp_worker(Adder(), settings=WorkerSettings(extensions=False)) as worker:
        (device,) = connect(endpoint(worker), timeouts=QUICK, token=TOKEN)
        device.memory()
        device.close()
    assert "is a stock one and knows no token" in caplog.text


def test_without_a_token_nothing_has_changed() -> None:
    with tcp_worker(Adder()) as worker, connected(worker) as (device,):
        device.memory()


def test_a_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"  " + SECRET + b" \nignored\n")
    nonces = Nonces(bytes(32), bytes(32))
    assert Token.read(path).proof(Role.CLIENT, nonces) == TOKEN.proof(Role.CLIENT, nonces)
    assert SECRET.decode() not in repr(Token.read(path))
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="a token of 5 bytes is not accepted; make one of 16 to 4096"):
        Token.read(path)
    with pytest.raises(ConfigError, match="cannot read the token file"):
        Token.read(tmp_path / "absent")


def test_a_worker_that_passes_for_a_stock_one_cannot_ask() -> None:
    adder = Adder()
    with pytest.raises(ConfigError, match="passes for a stock one"):
        Worker([adder], replace(WorkerSettings(), token=TOKEN, extensions=False))
    adder.close()
