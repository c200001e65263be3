"""Tokens of a growing answer to text, in whole characters."""

from __future__ import annotations

import codecs

from app.engine.text.tokenizer import Tokenizer

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Feed tokens in order; text comes out as soon as its last byte is there.

    Bytes that can no longer become a character turn into U+FFFD at that moment, and what follows them is kept. All that
    comes out joined equals decoding all pieces at once. `drop_first_space` is for text that begins with a token, not
    behind a prompt: SentencePiece-like vocabularies put a space there which nobody wrote.
    """

    def __init__(self, tokenizer: Tokenizer, show_special: bool = False, *, drop_first_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._decoder = _decoder("replace")
        self._drop_space = drop_first_space and tokenizer.vocabulary.add_space_prefix

    def push(self, token: int) -> str:
        """Text that is whole now; empty while a character is still missing bytes."""
        return self.push_piece(self._tokenizer.piece(token, show_special=self._show_special))

    def push_piece(self, piece: bytes) -> str:
        """As `push`, for the bytes that the next token stands for."""
        if self._drop_space:
            piece = piece.removeprefix(b" ")
            self._drop_space = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The rest: one U+FFFD when the last character never became whole, else nothing."""
        return self._decoder.decode(b"", True)
