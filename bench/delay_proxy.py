"""A TCP proxy that holds every byte back for a fixed time in each direction, and slows nothing else down.

One thread per direction stamps what arrives, another passes it on when it is due; so a link has a delay and all the
bandwidth of this machine, like a long fast wire.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

_PIECE_BYTES = 1 << 20
#: Bytes on the wire at once, in pieces; what a link of this machine's bandwidth holds in 10 ms, with room to spare.
_MAX_PIECES = 64

_Wire = queue.Queue[tuple[float, bytes]]


class DelayProxy:
    """Listens on a port of its own and leads every connection to `target` over a link that takes `delay_s` one way."""

    def __init__(self, target: tuple[str, int], delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that stand end with their peers."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._lead(near, far)
                self._lead(far, near)

    def _lead(self, source: socket.socket, target: socket.socket) -> None:
        wire: _Wire = queue.Queue(_MAX_PIECES)
        threading.Thread(target=self._take, args=(source, wire), daemon=True).start()
        threading.Thread(target=self._give, args=(wire, target), daemon=True).start()

    def _take(self, source: socket.socket, wire: _Wire) -> None:
        piece = b"-"
        while piece:
            try:
                piece = source.recv(_PIECE_BYTES)
            except OSError:
                piece = b""
            wire.put((time.monotonic() + self._delay_s, piece))

    @staticmethod
    def _give(wire: _Wire, target: socket.socket) -> None:
        with suppress(OSError):  # the receiver has left
            while True:
                due_s, piece = wire.get()
                if (early_s := due_s - time.monotonic()) > 0:
                    time.sleep(early_s)
                if not piece:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(piece)
