"""Small helpers around blocking sockets whose waits end once a second, so that deadlines can be looked at."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence

TICK_S = 1.0

_TIMEVAL = struct.Struct("@ll")


def set_ticks(sock: socket.socket, tick_s: float = TICK_S) -> None:
    """Make blocking reads and writes give up after a tick without progress, with BlockingIOError.

    The socket stays a blocking one: Python's own time-outs would make it non-blocking and cost a poll per call.
    """
    sock.settimeout(None)
    value = _TIMEVAL.pack(int(tick_s), int(tick_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def receive_tick(sock: socket.socket, space: memoryview) -> int | None:
    """Received bytes, 0 at the end of the stream, None when a tick passed without any."""
    try:
        return sock.recv_into(space)
    except BlockingIOError:
        return None


def send_everything(sock: socket.socket, buffers: Sequence[bytes | memoryview], patience_s: float) -> None:
    """Send buffers of bytes over a socket with ticks. Raises TimeoutError when nothing is taken for `patience_s`."""
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    moved_at = time.monotonic()
    while left:
        try:
            n = sock.sendmsg(left)
        except BlockingIOError:
            if time.monotonic() - moved_at > patience_s:
                raise TimeoutError(f"not a byte was taken for {patience_s:g} s") from None
            continue
        moved_at = time.monotonic()
        while left and n >= len(left[0]):
            n -= len(left.pop(0))
        if left:
            left[0] = left[0][n:]


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed, or we have, also while bytes are left to read; False where nobody can tell."""
    poller = select.poll()
    poller.register(sock, getattr(select, "POLLRDHUP", 0))
    return bool(poller.poll(0))


def receive_exactly(sock: socket.socket, n: int) -> bytes:
    """`n` bytes of a socket that has a time-out of its own. Raises TimeoutError, EOFError, OSError."""
    data = bytearray(n)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if got == 0:
            raise EOFError
        view = view[got:]
    return bytes(data)
