"""Small helpers around blocking sockets whose waits end once a second, so that deadlines can be looked at."""

from __future__ import annotations

import socket
import struct

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
