"""The client's first words on a connection: who is there, and which version it speaks."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

from app.errors import DeviceLost, RemoteProtocolError, VersionMismatch
from app.rpc.endpoint import Dial, Timeouts, tune
from app.rpc.messages import Hello, HelloAnswer
from app.rpc.protocol import encode
from app.rpc.proving import prove
from app.rpc.sockets import receive_exactly
from app.rpc.specs import SPECS, SPOKEN, Specs, decode_answer
from app.rpc.token import Token
from app.rpc.wire import ANSWER_HEADER, TANDEM_PAD, Command

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """What a worker said about itself."""

    version: tuple[int, int]
    patch: int
    is_tandem: bool

    @property
    def specs(self) -> Specs:
        return SPECS[self.version]

    def __str__(self) -> str:
        kind = "tandem" if self.is_tandem else "stock"
        return f"{kind} worker, protocol {self.version[0]}.{self.version[1]}.{self.patch}"


def dial_and_greet(
    dial: Dial, endpoint: str, timeouts: Timeouts, token: Token | None = None, *, warns: bool = True
) -> tuple[socket.socket, Peer]:
    """A greeted connection; with a token, one on which both sides have proved that they hold it, if the worker has one.

    With `warns`, a worker that has no token is told in the log; say so for one of its connections alone. Raises
    DeviceLost, RemoteProtocolError (not a worker), VersionMismatch and AccessDenied.
    """
    sock = dial()
    try:
        tune(sock)
        peer = _greet(sock, endpoint, timeouts)
        if token is not None:
            _authenticate(sock, peer, endpoint, token, warns)
        return sock, peer
    except BaseException:
        sock.close()
        raise


def _greet(sock: socket.socket, endpoint: str, timeouts: Timeouts) -> Peer:
    sock.settimeout(timeouts.hello_s)
    spec = next(iter(SPECS.values()))[Command.HELLO]
    assert spec.answer is not None
    wanted = spec.answer.fixed_bytes
    try:
        sock.sendall(encode(Hello(), next(iter(SPECS))))
        (size,) = ANSWER_HEADER.unpack(receive_exactly(sock, ANSWER_HEADER.size))
        if size != wanted:
            raise RemoteProtocolError(
                f"{endpoint} is not an RPC worker: its first answer announces {size} bytes instead of {wanted}; "
                f"check the host and the port"
            )
        answer: HelloAnswer = decode_answer(spec, memoryview(receive_exactly(sock, wanted)))
    except TimeoutError as error:
        raise DeviceLost(
            endpoint,
            f"the port is open, but nothing answered within {timeouts.hello_s:g} s; it is no RPC worker, "
            f"or a stock worker that is serving another client",
            command="HELLO",
            reached=False,
        ) from error
    except EOFError as error:
        cause = "the peer hung up; is it an RPC worker?"
        raise DeviceLost(endpoint, cause, command="HELLO", reached=False) from error
    except OSError as error:
        raise DeviceLost(endpoint, error.strerror or str(error), command="HELLO", reached=False) from error
    version = (answer.major, answer.minor)
    if version not in SPECS:
        raise VersionMismatch(endpoint, (answer.major, answer.minor, answer.patch), SPOKEN)
    return Peer(version, answer.patch, answer.pad == TANDEM_PAD)


def _authenticate(sock: socket.socket, peer: Peer, endpoint: str, token: Token, warns: bool) -> None:
    level = logging.WARNING if warns else logging.DEBUG
    if not peer.is_tandem:
        log.log(level, "worker %s is a stock one and knows no token: whoever reaches it can use it", endpoint)
        return
    try:
        if not prove(sock, peer, endpoint, token):
            log.log(level, "worker %s asks for no token: whoever reaches it can use it", endpoint)
    except (EOFError, OSError) as error:
        cause = str(error) or "the worker hung up"
        raise DeviceLost(endpoint, f"while both sides showed their token: {cause}", command="AUTH_PROVE") from error
