"""A secret that clients and workers share, and how each proves to the other that it has it without telling it.

Each side draws a nonce; a proof is HMAC-SHA256 with the secret over the prover's role and both nonces, so no proof is
good twice, nor in the other direction. The client proves first: a worker tells strangers nothing they could test
guesses on. The bytes that follow are neither signed nor encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from app.errors import ConfigError

NONCE_BYTES = PROOF_BYTES = 32

#: Whoever listens can test guesses on a proof he has heard: a secret must be too long to be guessed.
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


class Role(Enum):
    """Who proves. The values go into the proofs."""

    CLIENT = b"tandem rpc client"
    WORKER = b"tandem rpc worker"


@dataclass(frozen=True, slots=True)
class Nonces:
    """What both sides drew for one connection."""

    client: bytes
    worker: bytes


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Token:
    """The secret. It is never written anywhere, logs and error messages included."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ConfigError(
                f"a token of {len(secret)} bytes is not accepted; make one of {MIN_SECRET_BYTES} to "
                f"{MAX_SECRET_BYTES}, for example by `openssl rand -hex 32`"
            )
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> Token:
        """The first line of a file, without the space around it. Raises ConfigError."""
        try:
            with path.open("rb") as file:
                line = file.readline(MAX_SECRET_BYTES + 2)
        except OSError as error:
            raise ConfigError(f"cannot read the token file {path}: {error.strerror or error}") from error
        try:
            return cls(line.strip())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        return "<Token>"

    def proof(self, role: Role, nonces: Nonces) -> bytes:
        return hmac.digest(self._secret, role.value + nonces.client + nonces.worker, hashlib.sha256)

    def is_proved(self, proof: bytes, role: Role, nonces: Nonces) -> bool:
        """Whether the peer in this role holds the same secret; takes as long whatever the proof is."""
        return hmac.compare_digest(proof, self.proof(role, nonces))
