"""The sending end of a route: a worker's connection to another one, which takes nothing but pushes."""

from __future__ import annotations

import logging
import socket

from app.errors import DeviceError
from app.rpc.endpoint import Timeouts, tcp_dial
from app.rpc.handshake import Peer, dial_and_greet
from app.rpc.messages import PushAttach, PushData
from app.rpc.protocol import AnswerParser, encode
from app.rpc.proving import ask
from app.rpc.sockets import send_everything, set_ticks
from app.rpc.token import Token

log = logging.getLogger(__name__)

#: How long a worker may take to be reached when a route is opened.
REACH = Timeouts(connect_s=3.0, hello_s=3.0)

#: How long a push may wait for its receiver, which may be computing all the while.
PATIENCE_S = 600.0


class Outlet:
    """Used by one thread at a time, except for `close`."""

    def __init__(self, sock: socket.socket, peer: Peer, endpoint: str) -> None:
        self._sock = sock
        self._version = peer.version
        self._endpoint = endpoint
        self._is_open = True
        set_ticks(sock)

    @classmethod
    def open(cls, endpoint: str, ticket: bytes, token: Token | None) -> Outlet:
        """Connect, show the token if any, hand in the ticket. Blocks. Raises TandemError, EOFError, OSError."""
        sock, peer = dial_and_greet(tcp_dial(endpoint, REACH), endpoint, REACH, token)
        try:
            if not peer.is_tandem:
                raise DeviceError(f"{endpoint} is no Tandem worker")
            parser = AnswerParser()
            parser.understands_notices = True
            ask(sock, parser, peer, PushAttach(ticket))
        except BaseException:
            sock.close()
            raise
        return cls(sock, peer, endpoint)

    def head(self, sequence: int, n_bytes: int) -> bytes:
        """What goes in front of a push."""
        return encode(PushData(sequence), self._version, n_bytes)

    def send(self, sequence: int, data: memoryview) -> bool:
        """Send one push. False: the route has failed, now or before."""
        return self.send_behind(self.head(sequence, len(data)), data)

    def send_behind(self, head: bytes, data: memoryview) -> bool:
        """Send one push whose head was made before."""
        if not self._is_open:
            return False
        try:
            send_everything(self._sock, (head, data), PATIENCE_S)
        except OSError as error:
            if self._is_open:  # else it was closed on purpose
                log.warning("cannot push to %s any more: %s", self._endpoint, error)
            self.close()
            return False
        return True

    def close(self) -> None:
        """From any thread; a send in progress fails. May be called twice."""
        self._is_open = False
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was faster
            pass
        self._sock.close()
