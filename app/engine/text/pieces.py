"""What each token stands for, as bytes."""

from __future__ import annotations

import re
from collections.abc import Callable

from app.engine.text.bpe import byte_characters
from app.engine.text.special_ids import CONTROL_TYPES, TokenType
from app.engine.text.spm import SPACE
from app.engine.text.vocab import Vocabulary

_LITERAL = (*CONTROL_TYPES, TokenType.USER_DEFINED)


class Pieces:
    """The bytes of tokens, worked out when first asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = vocabulary.texts
        self._types = vocabulary.types
        self._always_shown: set[int] = set()
        self._shown: list[bytes | None] = [None] * len(vocabulary)
        self._unmap: Callable[[str], bytes] = _bytes_of_mapped if vocabulary.model == "gpt2" else _bytes_of_spaced

    def piece(self, token: int, show_special: bool) -> bytes:
        if token < 0:
            raise IndexError(f"token {token} is negative")
        if not show_special and self._types[token] in CONTROL_TYPES and token not in self._always_shown:
            return b""
        piece = self._shown[token]
        if piece is None:
            piece = self._shown[token] = self._make(token)
        return piece

    def show_always(self, token: int) -> None:
        self._always_shown.add(token)

    def _make(self, token: int) -> bytes:
        kind, text = self._types[token], self._texts[token]
        if kind in _LITERAL:
            return text.encode("utf-8", "surrogateescape")
        if kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.BYTE:
            return (
                bytes([int(text[3:5], 16)]) if _BYTE_TOKEN.fullmatch(text) else text.encode("utf-8", "surrogateescape")
            )
        return self._unmap(text)


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_OF = {char: byte for byte, char in enumerate(byte_characters())}


def _bytes_of_mapped(text: str) -> bytes:
    """Byte-level vocabularies write each byte as a character; what is no such character is kept as text."""
    try:
        return bytes([_BYTE_OF[char] for char in text])
    except KeyError:
        return b"".join(
            bytes([_BYTE_OF[char]]) if char in _BYTE_OF else char.encode("utf-8", "surrogateescape") for char in text
        )


def _bytes_of_spaced(text: str) -> bytes:
    return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


def tidy_spaces(data: bytes) -> bytes:
    """Take away the space before marks, around a lone apostrophe, and before contractions, in this order."""
    data = _BEFORE_MARK.sub(rb"\1", data)
    data = data.replace(b" ' ", b"'")
    return _BEFORE_SHORT.sub(rb"\1", data)


_BEFORE_MARK = re.compile(rb" ([?!.,])")
_BEFORE_SHORT = re.compile(rb" ('(?:s|m|re|ve))")
