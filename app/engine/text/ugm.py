"""Unigram vocabularies ("t5"): the segmentation with the highest sum of token scores.

The search is the `tokenizers` core's; ours is the normalisation in front of it, as the file describes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models

from app.engine.text.charsmap import CharsMap
from app.engine.text.special_ids import TokenType
from app.engine.text.spm import SPACE
from app.engine.text.vocab import ESCAPED_BYTES, PREFIX, Vocabulary
from app.errors import FormatError

_INVALID = re.compile(f"[{ESCAPED_BYTES}]")
_SPACES = re.compile(r" +")


class UgmModel:
    """Tokens of one piece of raw text."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        unknown = vocabulary.ids.unknown
        if unknown is None or not vocabulary.scores:
            raise FormatError("a unigram vocabulary needs scores and an unknown token; the file lacks one of them")
        self._add_space_prefix = vocabulary.add_space_prefix
        self._merge_spaces = vocabulary.remove_extra_whitespaces
        charsmap = metadata.get(PREFIX + "precompiled_charsmap")
        self._charsmap = None if charsmap is None else CharsMap(bytes(byte & 0xFF for byte in charsmap))
        # Ids of the core, in order: the unknown token, then all that text may become.
        kinds = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        self._tokens = [unknown, *(i for i, kind in enumerate(vocabulary.types) if kind in kinds and i != unknown)]
        entries = [
            (vocabulary.texts[i], 0.0 if vocabulary.types[i] == TokenType.USER_DEFINED else vocabulary.scores[i])
            for i in self._tokens
        ]
        self._core = Tokenizer(models.Unigram(entries, 0, False))

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of `text`. Bytes that are not UTF-8 count as U+FFFD; runs of unknown characters are one token."""
        text = self._normalise(_INVALID.sub("\ufffd", text))
        ids = self._core.encode(text, add_special_tokens=False).ids if text else []
        return [self._tokens[i] for i in ids]

    def _normalise(self, text: str) -> str:
        if self._charsmap is not None:
            text = self._charsmap.apply(text)
        if self._merge_spaces:
            words = text.strip(" ")
            return SPACE + _SPACES.sub(SPACE, words) if words else ""
        # The mark goes before the first character that is no space, behind those that are.
        head = len(text) - len(text.lstrip(" "))
        if self._add_space_prefix and head < len(text):
            text = f"{text[:head]} {text[head:]}"
        return text.replace(" ", SPACE)
