"""Where connections wait until they have said HELLO: one thread for all, so that strangers cost next to nothing."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import RemoteProtocolError
from app.rpc.endpoint import tune
from app.rpc.protocol import RequestParser

log = logging.getLogger(__name__)

#: Connections without a HELLO; when more come, the one that has waited longest goes.
MAX_WAITING = 512

#: Under a flood of strangers the log gets one line in this time.
COMPLAIN_EVERY_S = 10.0

#: How long to leave the listener alone after the system refused a connection, most likely for want of descriptors.
REFUSED_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Guest:
    """A connection and what it has said so far."""

    sock: socket.socket
    name: str
    parser: RequestParser
    deadline: float


class Lobby:
    """Accepts connections, reads their HELLO and hands them over with the parser that has read it."""

    def __init__(
        self,
        listener: socket.socket,
        new_parser: Callable[[], RequestParser],
        admit: Callable[[socket.socket, str, RequestParser], None],
        hello_s: float,
    ) -> None:
        self._listener = listener
        self._new_parser = new_parser
        self._admit = admit
        self._hello_s = hello_s
        self._guests: dict[int, Guest] = {}  # by descriptor, the longest waiting first
        self._complained_at = -COMPLAIN_EVERY_S
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="rpc-lobby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and hang up on everybody who waits. Blocks."""
        os.write(self._woken, b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fd == self._wake:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fd in self._guests:
                        self._listen_to(self._guests[key.fd])
                self._dismiss_silent()
        finally:
            for guest in list(self._guests.values()):
                self._dismiss(guest)
            self._selector.close()
            self._listener.close()
            os.close(self._wake)
            os.close(self._woken)

    def _patience_s(self) -> float | None:
        """Seconds until the first guest's deadline; guests come in the order of their deadlines."""
        first = next(iter(self._guests.values()), None)
        return None if first is None else max(first.deadline - time.monotonic(), 0)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
            sock.setblocking(False)
            tune(sock)
        except BlockingIOError:  # the client was gone before we looked
            return
        except OSError as error:
            self._make_room(f"cannot accept a client: {error}")
            time.sleep(REFUSED_PAUSE_S)
            return
        if len(self._guests) >= MAX_WAITING:
            self._make_room(f"more than {MAX_WAITING} connections have not said HELLO")
        name = f"{address[0]}:{address[1]}"
        guest = Guest(sock, name, self._new_parser(), time.monotonic() + self._hello_s)
        self._guests[sock.fileno()] = guest
        self._selector.register(sock, selectors.EVENT_READ)

    def _make_room(self, reason: str) -> None:
        """Hang up on whoever has waited longest."""
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = now
            log.warning("%s; closing those that waited longest", reason)
        if self._guests:
            self._dismiss(next(iter(self._guests.values())))

    def _listen_to(self, guest: Guest) -> None:
        try:
            n = guest.sock.recv_into(guest.parser.space())
            if n == 0:
                return self._dismiss(guest)
            guest.parser.received(n)
            greeted = guest.parser.next_request() is not None
        except BlockingIOError:
            return
        except OSError:
            return self._dismiss(guest)
        except RemoteProtocolError as error:
            return self._dismiss(guest, str(error))
        if greeted:
            self._let_go(guest)
            self._admit(guest.sock, guest.name, guest.parser)

    def _dismiss_silent(self) -> None:
        now = time.monotonic()
        for guest in list(self._guests.values()):
            if guest.deadline > now:
                return
            self._dismiss(guest, f"no HELLO within {self._hello_s:g} s")

    def _dismiss(self, guest: Guest, reason: str | None = None) -> None:
        if reason is not None:
            log.warning("closed client %s: %s", guest.name, reason)
        self._let_go(guest)
        guest.sock.close()

    def _let_go(self, guest: Guest) -> None:
        self._selector.unregister(guest.sock)
        del self._guests[guest.sock.fileno()]
