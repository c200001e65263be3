"""Where a worker takes pushes from other workers.

A client asks its session here for a ticket, and hands it to a worker of its choice, which brings it on a connection of
its own. From then on that connection belongs to the session: only its thread reads it, when the client has said where
the next push goes. So nothing is received that was not announced, memory is never taken on a stranger's word, and a
sender that is too early waits in its own send.
"""

from __future__ import annotations

import secrets
import threading
from functools import partial

from app.errors import RemoteProtocolError
from app.rpc.client_socket import ClientSocket
from app.rpc.messages import PushData
from app.rpc.protocol import encode

TICKET_BYTES = 32

#: Any: the message is the same in all.
VERSION = (7, 0)

#: How often the end of a connection is looked for that nobody reads.
LOOK_EVERY_S = 1.0


class Inlet:
    """One route's end. `attach` and `wait` are for the thread of the connection that brings the pushes."""

    def __init__(self) -> None:
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self._feed: ClientSocket | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()

    def attach(self, feed: ClientSocket) -> bool:
        """Whether the connection is taken; only the first one is."""
        with self._lock:
            if self._feed is not None or self._over.is_set():
                return False
            self._feed = feed
            return True

    def wait(self) -> None:
        """Return when nothing is taken from the connection any more, or it has ended."""
        feed = self._feed
        while not self._over.wait(LOOK_EVERY_S):
            if feed is not None and feed.has_hung_up:
                self.close()

    def close(self) -> None:
        """Take nothing any more. From any thread; may be called twice."""
        with self._lock:
            self._over.set()
            feed = self._feed
        if feed is not None:
            feed.stop()

    def next(self, sequence: int, size: int, owner: ClientSocket) -> ClientSocket:
        """Wait for the head of the next push; the connection with its data next in line.

        `owner` is the client for whom we wait. Raises EOFError, OSError, RemoteProtocolError.
        """
        feed = self._feed
        if feed is None or self._over.is_set():
            raise EOFError("nobody pushes here")
        feed.on_tick = partial(_look_after, owner)
        request = feed.next_request()
        if not isinstance(request, PushData) or (request.sequence, feed.payload_left) != (sequence, size):
            raise RemoteProtocolError(
                f"push {sequence} of {size} bytes was expected, but {request.command.name} came with "
                f"{feed.payload_left} bytes"
            )
        return feed

    def take_at_once(self, sequence: int, target: memoryview, owner: ClientSocket) -> bool:
        """Receive the next push into `target`, if it comes as expected and begins to within a tick.

        False: it did not; `next` goes on, or says what is wrong, from where this stopped. `owner` as for `next`.
        Raises EOFError, OSError, RemoteProtocolError.
        """
        feed = self._feed
        if feed is None or self._over.is_set():
            return False
        feed.on_tick = partial(_look_after, owner)  # what comes in part is waited for
        return feed.receive_expected(encode(PushData(sequence), VERSION, len(target)), target)


def _look_after(owner: ClientSocket) -> None:
    """End a wait whose outcome nobody is left to hear of."""
    if owner.has_hung_up:
        raise EOFError("the client has left")


class Inlets:
    """The inlets of all clients of a worker, by ticket. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Inlet] = {}
        self._lock = threading.Lock()

    def new(self) -> Inlet:
        inlet = Inlet()
        with self._lock:
            self._waiting[inlet.ticket] = inlet
        return inlet

    def attach(self, ticket: bytes, feed: ClientSocket) -> Inlet:
        """The inlet that the ticket is for. Raises RemoteProtocolError."""
        with self._lock:
            inlet = self._waiting.pop(ticket, None)
        if inlet is None or not inlet.attach(feed):
            raise RemoteProtocolError("a push was announced with a ticket that is not, or no longer, good here")
        return inlet

    def drop(self, inlet: Inlet) -> None:
        with self._lock:
            self._waiting.pop(inlet.ticket, None)
        inlet.close()
