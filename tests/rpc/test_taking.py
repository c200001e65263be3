"""A turn behind a push: in whatever pieces the push comes, the same answers as when both come alone."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.raw import RawClient, frame
from tests.rpc.test_turns import BEST, TAKE_TURN, TERMS, Held, native
from tests.rpc.workers import tcp_worker, wait_until

ACCEPT, ATTACH, TAKE, DATA, READ_REGION = 137, 139, 141, 142, 134
PUSHED = TERMS[0].tobytes()
SUMS = np.add(*TERMS)
LOST = bytes(4)


@pytest.fixture(params=[native, NumpyDevice], ids=["native", "numpy"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    make: Callable[[], Device] = request.param
    with tcp_worker(make()) as made:
        yield made


@pytest.fixture
def client(worker: Worker) -> Iterator[RawClient]:
    with RawClient(worker.port) as made:
        yield made


@pytest.fixture
def feed(worker: Worker, client: RawClient) -> Iterator[RawClient]:
    """Another worker's end of route 0."""
    with RawClient(worker.port) as made:
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert made.ask(ATTACH, client.ask(ACCEPT, struct.pack("<I", 0))) == b"\1"
        yield made


def push(sequence: int, data: bytes = PUSHED) -> bytes:
    return struct.pack("<BQQ", DATA, 8 + len(data), sequence) + data


def step(held: Held, sequence: int) -> bytes:
    """Take a push as the first term, then the second term and a run."""
    taken = frame(TAKE, struct.pack("<IQQQ", 0, sequence, held.base, len(PUSHED)))
    return taken + frame(TAKE_TURN, held.turn(held.terms[1]))


def answers(client: RawClient) -> tuple[bytes, bytes]:
    return client.answer(), client.answer()


def test_a_turn_computes_with_the_push_before_it(client: RawClient, feed: RawClient) -> None:
    held = Held(client)
    for sequence in range(4):
        client.send(step(held, sequence))
        feed.send(push(sequence))
        age, best = answers(client)
        assert age != LOST and best == bytes(BEST.select(SUMS.data.cast("B")))
        client.tell(READ_REGION, struct.pack("<QQ", held.base, 16))
        assert client.answer() == PUSHED


@pytest.mark.parametrize("cut", range(1, len(push(0))))
def test_a_push_may_come_in_pieces(client: RawClient, feed: RawClient, cut: int) -> None:
    held, whole = Held(client), push(1)
    client.send(step(held, 0) + step(held, 1))
    feed.send(push(0) + whole[:cut])
    assert answers(client)[0] != LOST  # the worker waits for the rest from here on
    feed.send(whole[cut:])
    age, best = answers(client)
    assert age != LOST and best == bytes(BEST.select(SUMS.data.cast("B")))


@pytest.mark.parametrize(
    "wrong",
    [push(7), push(0, PUSHED + b"x"), push(0, PUSHED[:4]), frame(15), b"\xff" * 40, bytes([DATA]) + b"\xff" * 40],
    ids=["sequence", "long", "short", "command", "no command", "size"],
)
def test_a_turn_behind_a_push_that_is_another_is_done_all_the_same(
    client: RawClient, feed: RawClient, wrong: bytes
) -> None:
    """The client is told, and throws its result away; the session lives on."""
    held = Held(client)
    client.send(step(held, 0))
    feed.send(wrong)
    with suppress(OSError):  # the worker may have hung up already
        feed.sock.shutdown(socket.SHUT_WR)
    age, best = answers(client)
    assert age == LOST and len(best) == BEST.n_bytes
    client.send(step(held, 1))
    assert answers(client)[0] == LOST


def test_a_senseless_turn_behind_a_push_is_refused_in_its_turn(client: RawClient, feed: RawClient) -> None:
    held = Held(client)
    wrong = frame(TAKE_TURN, held.turn(graph_id=6))
    client.send(step(held, 0)[: -len(frame(TAKE_TURN, held.turn(held.terms[1])))] + wrong)
    feed.send(push(0))
    notice = b""
    while part := client.sock.recv(4096):
        notice += part
    assert b"graph 6 of device 0 is not kept here" in notice


@pytest.mark.parametrize("cut", [5, len(push(0)) - len(PUSHED), len(push(0)) - 1], ids=["head", "no data", "some data"])
def test_a_client_that_leaves_is_not_waited_for_with_half_a_push(cut: int) -> None:
    """It would keep its memory for as long as a sender may be silent."""
    settings = WorkerSettings(hello_s=2.0, idle_s=600.0)  # looks up twice a second
    with tcp_worker(native(), settings=settings) as worker, RawClient(worker.port) as feed:
        with RawClient(worker.port) as client:
            held = Held(client)
            client.ask(TAKE_TURN, held.turn(*held.terms))
            feed.ask(ATTACH, client.ask(ACCEPT, struct.pack("<I", 0)))
            feed.send(push(0)[:cut])
            client.send(step(held, 0))
        wait_until(lambda: not worker._sessions)
