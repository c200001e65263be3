"""A wire tap: passes one port on to another and notes the commands that go by, in order."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from app.rpc.wire import Command


class Tap:
    """Listens on `port`. `commands` are (command, bytes of its body), over all connections.

    With `keep_bytes`, `requests` holds whole requests up to that size, and `answers` all that came back.
    """

    def __init__(self, target: int, keep_bytes: int = 0) -> None:
        self.commands: list[tuple[Command, int]] = []
        self.requests: list[bytes] = []
        self.answers = bytearray()
        self._keep_bytes = keep_bytes
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._socks += [near, far]
                self._start(self._requests, near, far)
                self._start(self._pass, far, near)

    def _requests(self, source: socket.socket, target: socket.socket) -> None:
        """Pass requests on, reading only their headers."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                header = _exactly(source, 9)
                command, size = struct.unpack("<BQ", header)
                self.commands.append((Command(command), size))
                target.sendall(header)
                if size <= self._keep_bytes:
                    body = _exactly(source, size)
                    self.requests.append(header + body)
                    target.sendall(body)
                    continue
                while size:
                    part = source.recv(min(size, 1 << 20))
                    if not part:
                        raise EOFError
                    target.sendall(part)
                    size -= len(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 20):
                if self._keep_bytes:
                    self.answers += part
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise EOFError
        data += part
    return data


@contextmanager
def tapped(port: int, keep_bytes: int = 0) -> Iterator[Tap]:
    tap = Tap(port, keep_bytes)
    try:
        yield tap
    finally:
        tap.close()
