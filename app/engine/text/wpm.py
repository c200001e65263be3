"""WordPiece ("bert" vocabularies): words, each spelled by the longest tokens from left to right, or unknown as a whole.

The vocabulary is stored with a mark before tokens that begin a word; tokens that continue one stand bare.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from app.engine.text.special_ids import CONTROL_TYPES
from app.engine.text.spm import SPACE
from app.engine.text.vocab import ESCAPED_BYTES, Vocabulary

_CACHED_WORDS = 1 << 16
_INVALID = re.compile(f"[{ESCAPED_BYTES}]")

#: Ideographs, each of which is a word.
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WpmModel:
    """Tokens of one piece of raw text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {t: token for t, token in vocabulary.index.items() if vocabulary.types[token] not in CONTROL_TYPES}
        self._longest = max(map(len, self._ids), default=0)
        self._unknown = [] if vocabulary.ids.unknown is None else [vocabulary.ids.unknown]
        self._lowercase = vocabulary.lowercase
        self._strip_accents = vocabulary.strip_accents
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, after_special: bool) -> list[int]:
        tokens: list[int] = []
        for word in self._words(_INVALID.sub("\ufffd", text)):
            tokens += self._word(word)
        return tokens

    def _words(self, text: str) -> Iterator[str]:
        """Normalised words: split at white space, and around every mark, ASCII symbol and ideograph."""
        if self._strip_accents:
            text = unicodedata.normalize("NFD", text)
        word: list[str] = []
        for char in text:
            kind = unicodedata.category(char)
            if char.isspace():
                yield "".join(word)
                word.clear()
            elif char in "\0\ufffd" or kind == "Cc" or (kind == "Mn" and self._strip_accents):
                continue
            elif _stands_alone(char, kind):
                yield "".join(word)
                yield char
                word.clear()
            else:
                word.append(char.lower() if self._lowercase else char)
        yield "".join(word)

    def _word(self, word: str) -> list[int]:
        if not word:
            return []
        known = self._cache.get(word)
        if known is None:
            if len(self._cache) >= _CACHED_WORDS:
                self._cache.clear()
            known = self._cache[word] = self._spell(SPACE + word)
        return known

    def _spell(self, word: str) -> list[int]:
        tokens: list[int] = []
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                token = self._ids.get(word[start:end])
                if token is not None:
                    tokens.append(token)
                    start = end
                    break
            else:
                return self._unknown
        return tokens


def _stands_alone(char: str, kind: str) -> bool:
    if kind[0] == "P" or (kind[0] == "S" and char < "\x7f"):
        return True
    return any(low <= ord(char) <= high for low, high in _IDEOGRAPHS) if char >= "\u3400" else False
