"""The client's side of the token: proving that we hold it and that the worker does, before anything is asked."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from app.errors import AccessDenied, RemoteProtocolError
from app.rpc.messages import AuthChallenge, AuthProve, Challenge, Proof, Request
from app.rpc.protocol import AnswerParser, encode
from app.rpc.specs import answer_range, decode_answer
from app.rpc.token import Nonces, Role, Token, new_nonce

if TYPE_CHECKING:
    from app.rpc.handshake import Peer


def prove(sock: socket.socket, peer: Peer, endpoint: str, token: Token) -> bool:
    """Both sides prove themselves on a fresh connection to a Tandem worker.

    False: the worker has no token and is taken as it is, like a stock one. Raises AccessDenied,
    RemoteProtocolError, EOFError, OSError.
    """
    parser = AnswerParser()
    parser.understands_notices = True
    own_nonce = new_nonce()
    challenge: Challenge = ask(sock, parser, peer, AuthChallenge(own_nonce))
    if not challenge.demanded:
        return False
    nonces = Nonces(own_nonce, challenge.nonce)
    try:
        answer: Proof = ask(sock, parser, peer, AuthProve(token.proof(Role.CLIENT, nonces)))
    except RemoteProtocolError as error:
        raise AccessDenied(endpoint, str(error)) from error
    if not token.is_proved(answer.proof, Role.WORKER, nonces):
        raise AccessDenied(endpoint, "it does not hold the token itself; is this the right worker?")
    return True


def ask(sock: socket.socket, parser: AnswerParser, peer: Peer, request: Request) -> Any:
    """One round trip on a socket that nobody else uses yet. Raises RemoteProtocolError, EOFError, OSError."""
    spec = peer.specs[request.command]
    least, most = answer_range(spec, request)
    sock.sendall(encode(request, peer.version))
    while (size := parser.begin(request.command.name, least, most)) is None:
        _receive(sock, parser)
    while (body := parser.take_body(size)) is None:
        _receive(sock, parser)
    return decode_answer(spec, body)


def _receive(sock: socket.socket, parser: AnswerParser) -> None:
    n = sock.recv_into(parser.space())
    if n == 0:
        raise EOFError
    parser.received(n)
