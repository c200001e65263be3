"""Waits that end as they should, whatever the receiver has come to expect."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from app.rpc.short_waits import ShortWaits
from app.rpc.sockets import set_ticks

TICK_S = 0.02


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    set_ticks(near, TICK_S)
    with near, far:
        yield near, far


def expecting(near: socket.socket, soon: bool) -> ShortWaits:
    """A receiver whose last wait was a short one, or was not."""
    waits = ShortWaits(near)
    waits._soon = soon
    return waits


@pytest.mark.parametrize("soon", [False, True])
def test_bytes_go_into_one_space_after_the_other(ends: tuple[socket.socket, socket.socket], soon: bool) -> None:
    near, far = ends
    waits = expecting(near, soon)
    head, body = bytearray(3), bytearray(5)
    for _ in range(3):
        far.sendall(b"abcdefgh")
        assert waits.receive(memoryview(head), memoryview(body), flags=socket.MSG_WAITALL) == 8
        assert bytes(head + body) == b"abcdefgh"


@pytest.mark.parametrize("soon", [False, True])
def test_a_wait_in_vain_ends_with_the_tick(ends: tuple[socket.socket, socket.socket], soon: bool) -> None:
    near, _ = ends
    waits = expecting(near, soon)
    with pytest.raises(BlockingIOError):
        waits.receive(memoryview(bytearray(8)))


@pytest.mark.parametrize("soon", [False, True])
def test_the_end_of_the_stream_is_no_byte(ends: tuple[socket.socket, socket.socket], soon: bool) -> None:
    near, far = ends
    waits = expecting(near, soon)
    far.close()
    assert waits.receive(memoryview(bytearray(8))) == 0
