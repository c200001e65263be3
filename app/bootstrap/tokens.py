"""The secret that workers ask for, from where settings say it is."""

from __future__ import annotations

from pathlib import Path

from app.rpc.token import Token


def token_of(path: Path | None) -> Token | None:
    """Raises ConfigError for a file that holds no usable token."""
    return None if path is None else Token.read(path)
