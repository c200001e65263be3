"""A worker's end of one connection: requests in, bulk data in and out, answers out, with deadlines on silence."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from app.errors import RemoteProtocolError
from app.rpc.messages import Request
from app.rpc.protocol import RequestParser, encode_error_notice
from app.rpc.short_waits import ShortWaits
from app.rpc.sockets import TICK_S, has_hung_up, receive_tick, set_ticks

log = logging.getLogger(__name__)

#: How long a client may take to read the reason why it is hung up on.
LAST_WORDS_S = 1.0


class ClientSocket:
    """Used by one thread, except for `stop`.

    `hello_s` bounds the silence before HELLO and of a stranger, who has not shown the worker's token; `idle_s` a pause
    within a request and within taking an answer.
    """

    def __init__(self, sock: socket.socket, parser: RequestParser, *, hello_s: float, idle_s: float) -> None:
        set_ticks(sock, min(TICK_S, hello_s / 4, idle_s / 4))
        self._sock = sock
        self._short_waits = ShortWaits(sock)
        self._parser = parser
        self._hello_s = hello_s
        self._idle_s = idle_s
        self.is_stranger = False
        #: Called about once a second while nothing comes; what it raises ends the wait.
        self.on_tick: Callable[[], None] = lambda: None

    @property
    def payload_left(self) -> int:
        """Bulk bytes that belong to the last request and were not received yet."""
        return self._parser.payload_left

    @property
    def has_more(self) -> bool:
        """Whether the next request has begun to arrive already."""
        return self._parser.buffered > 0

    @property
    def has_hung_up(self) -> bool:
        """Whether the client has closed its end or we have ours, whatever is left to read."""
        return has_hung_up(self._sock)

    def next_request(self) -> Request:
        """The next request; its views are valid until the next call. Raises RemoteProtocolError, EOFError, OSError."""
        parser = self._parser
        while (request := parser.next_request()) is None:
            parser.received(self._receive(parser.space()))
        return request

    def request_at_hand(self) -> Request | None:
        """The next request if all of it is here already. Raises RemoteProtocolError."""
        return self._parser.next_request()

    def request_in_sight(self) -> Request | None:
        """The next request if all of it has come, be it unread; views of the last one are not valid any more.

        Raises RemoteProtocolError; what else is wrong with the connection is for the next wait to find.
        """
        request = self._parser.next_request()
        if request is None:
            try:
                n = self._sock.recv_into(self._parser.space(), 0, socket.MSG_DONTWAIT)
            except OSError:
                return None
            if n:
                self._parser.received(n)
                request = self._parser.next_request()
        return request

    def receive_payload(self, target: memoryview) -> None:
        """The next `len(target)` bytes of bulk data. Raises RemoteProtocolError, EOFError, OSError."""
        parser = self._parser
        while target:
            taken = parser.take_payload(len(target))
            if taken:
                target[: len(taken)] = taken
                target = target[len(taken) :]
                continue
            n = self._receive(target, socket.MSG_WAITALL)
            parser.passed(n)
            target = target[n:]

    def receive_expected(self, head: bytes, target: memoryview) -> bool:
        """Receive a request of just these bytes with bulk data for all of `target`, in one call if all goes well.

        False: it has not come within a tick, or something else has; the next request is to be looked at as any other.
        Raises RemoteProtocolError, EOFError, OSError.
        """
        parser = self._parser
        if parser.mid_request:
            return False
        space = parser.space()[: len(head)]
        try:
            n = self._sock.recvmsg_into((space, target), 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            return False
        if n == len(head) + len(target) and space == head:
            return True
        if n == 0:
            raise EOFError("end of stream")
        n_data = n - len(head)
        parser.received(min(n, len(head)))
        if n_data <= 0:
            return False
        if space != head:
            parser.feed(target[:n_data])
            return False
        parser.next_request()
        parser.passed(n_data)
        self.receive_payload(target[n_data:])
        return True

    def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        """A whole answer, however slowly it is taken; views are of bytes. Raises RemoteProtocolError, OSError."""
        try:
            n = self._sock.sendmsg(buffers)
        except BlockingIOError:
            n = 0
        if n == sum(map(len, buffers)):
            return
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        moved_at = time.monotonic()
        while True:
            while left and n >= len(left[0]):
                n -= len(left.pop(0))
            if not left:
                return
            left[0] = left[0][n:]
            try:
                n = self._sock.sendmsg(left)
            except BlockingIOError:
                if time.monotonic() - moved_at > self._idle_s:
                    raise RemoteProtocolError(f"the client took no byte of its answer for {self._idle_s:g} s") from None
                n = 0
            else:
                moved_at = time.monotonic()

    def say_why(self, reason: str) -> None:
        """Last words to a client that understands them; it has a moment to read them before the connection closes."""
        try:
            self._sock.settimeout(LAST_WORDS_S)
            self._sock.sendall(encode_error_notice(reason))
            self._sock.shutdown(socket.SHUT_WR)
            for _ in range(256):
                if not self._sock.recv(1 << 16):
                    break
        except OSError as error:
            log.debug("a client did not wait for the reason: %s", error)

    def stop(self) -> None:
        """Hang up, from any thread."""
        self._shut(socket.SHUT_RDWR)

    def stop_reading(self) -> None:
        """End the wait for requests, from any thread; last words can still be said."""
        self._shut(socket.SHUT_RD)

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:  # the client was faster
            pass

    def close(self) -> None:
        self._sock.close()

    def _receive(self, space: memoryview, flags: int = 0) -> int:
        """Receive something; with MSG_WAITALL all of `space`, unless a tick passes in the middle."""
        try:
            n = self._sock.recv_into(space, 0, flags) if flags else self._short_waits.receive(space)
        except BlockingIOError:
            n = self._wait(space)
        if n == 0:
            raise EOFError("end of stream")
        return n

    def _wait(self, space: memoryview) -> int:
        """The slow path of receiving: a tick has passed in silence."""
        began = time.monotonic()
        parser = self._parser
        while (n := receive_tick(self._sock, space)) is None:
            self.on_tick()
            silent_s = time.monotonic() - began
            if not parser.greeted and silent_s > self._hello_s:
                raise RemoteProtocolError(f"no HELLO within {self._hello_s:g} s")
            if self.is_stranger and silent_s > self._hello_s:
                raise RemoteProtocolError(f"the token was not shown within {self._hello_s:g} s")
            if parser.mid_request and silent_s > self._idle_s:
                raise RemoteProtocolError(f"silence for {self._idle_s:g} s in the middle of a request")
        return n
