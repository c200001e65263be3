"""Whether a client may ask a worker anything: the worker's side of the token; see `token`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.client_socket import ClientSocket
from app.rpc.protocol import RequestParser
from app.rpc.token import Nonces, Role, Token, new_nonce
from app.rpc.wire import Command

if TYPE_CHECKING:
    from app.rpc.session import Session

#: What strangers may say to a worker that has a token.
_FOR_STRANGERS = frozenset({Command.HELLO, Command.AUTH_CHALLENGE, Command.AUTH_PROVE})

#: The longest message of a stranger that is read to its end before it is refused.
STRANGER_MESSAGE_BYTES = 4096


class Trust:
    """One client's standing with a worker. Strangers get little room and time; without a token nobody is one."""

    def __init__(self, token: Token | None, socket: ClientSocket, parser: RequestParser) -> None:
        self._token = token
        self._socket = socket
        self._parser = parser
        self._nonces: Nonces | None = None
        self.given = token is None
        self._usual_message_bytes = parser.max_message_bytes
        if not self.given:
            socket.is_stranger = True
            parser.max_message_bytes = STRANGER_MESSAGE_BYTES

    def check(self, command: Command) -> None:
        """Raises RemoteProtocolError for what a stranger asks."""
        if not self.given and command not in _FOR_STRANGERS:
            raise RemoteProtocolError(
                f"{command.name} came from a client that has not shown the token of this worker; "
                f"start a Tandem client with --rpc-token-file, others are not served here"
            )

    def challenge(self, client_nonce: bytes) -> m.Challenge:
        if self._nonces is not None:
            raise RemoteProtocolError("AUTH_CHALLENGE came twice")
        self._nonces = Nonces(client_nonce, new_nonce())
        return m.Challenge(int(self._token is not None), self._nonces.worker)

    def prove(self, proof: bytes) -> m.Proof:
        """Checks a client's proof, once, and answers with our own. Raises RemoteProtocolError."""
        nonces, token = self._nonces, self._token
        if nonces is None or token is None or self.given:
            raise RemoteProtocolError("AUTH_PROVE came, but nothing is to be proved")
        if not token.is_proved(proof, Role.CLIENT, nonces):
            raise RemoteProtocolError("the client's token is not the one of this worker; give both the same file")
        self.given = True
        self._socket.is_stranger = False
        self._parser.max_message_bytes = self._usual_message_bytes
        return m.Proof(token.proof(Role.WORKER, nonces))


def auth_challenge(session: Session, request: m.AuthChallenge) -> None:
    session.answer(request.command, session.trust.challenge(request.nonce))


def auth_prove(session: Session, request: m.AuthProve) -> None:
    session.answer(request.command, session.trust.prove(request.proof))


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.AUTH_CHALLENGE: auth_challenge,
    Command.AUTH_PROVE: auth_prove,
}
