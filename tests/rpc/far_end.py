"""The far end of a connection in a test's own hands: it sees requests and answers them, or does not."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.rpc.dispatcher import Dispatcher
from app.rpc.endpoint import Timeouts
from app.rpc.handshake import Peer
from app.rpc.messages import Hello, Request
from app.rpc.protocol import RequestParser, encode
from tests.rpc.workers import QUICK


class FarEnd:
    """Reads requests from a socket; every answer is given by hand."""

    def __init__(self, sock: socket.socket, version: tuple[int, int] = (7, 0)) -> None:
        self.sock = sock
        sock.settimeout(20.0)
        self._parser = RequestParser(version)
        self._parser.feed(encode(Hello(), version))
        self._parser.next_request()

    def request(self) -> Request:
        """The next request, bulk data left in the stream."""
        while (request := self._parser.next_request()) is None:
            self._parser.received(self._some(self._parser.space()))
        return request

    def payload(self) -> bytes:
        """The bulk data of the last request."""
        data = bytearray()
        while self._parser.payload_left:
            taken = self._parser.take_payload(1 << 30)
            if not taken:
                space = memoryview(bytearray(min(self._parser.payload_left, 1 << 20)))
                n = self._some(space)
                self._parser.passed(n)
                taken = space[:n]
            data += taken
        return bytes(data)

    def _some(self, space: memoryview) -> int:
        n = self.sock.recv_into(space)
        if n == 0:
            raise EOFError
        return n

    def answer(self, body: bytes) -> None:
        self.sock.sendall(struct.pack("<Q", len(body)) + body)

    def value(self, number: int) -> None:
        self.answer(struct.pack("<Q", number))

    def has_nothing(self) -> bool:
        """Whether no byte of another request has arrived."""
        self.sock.settimeout(0.05)
        try:
            return self._parser.buffered == 0 and not self.sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(20.0)


@contextmanager
def dispatcher_pair(
    timeouts: Timeouts = QUICK, *, version: tuple[int, int] = (7, 0), tandem: bool = True
) -> Iterator[tuple[Dispatcher, FarEnd]]:
    """A dispatcher and its far end, joined in memory."""
    near, far = socket.socketpair()
    dispatcher = Dispatcher(near, Peer(version, 0, tandem), "far:1", timeouts)
    try:
        yield dispatcher, FarEnd(far, version)
    finally:
        dispatcher.close()
        far.close()


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Do something on the side; what it raises is raised at the end."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failure:
        raise failure[0]
