"""SentencePiece-like merging ("llama" vocabularies): the best-scored pair of neighbours first, ties to the left.

There is no merge table: two neighbours may merge when their concatenation is a token, and its score is the priority.
Words are merged here and remembered; long ones go to native code, or to `merge_long` where that is not built.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import add

from app.engine.text.special_ids import CONTROL_TYPES
from app.engine.text.vocab import Vocabulary

try:
    from app.engine.kernels import _merge
except ImportError:  # a wheel of Python alone
    NATIVE = False
else:
    NATIVE = True

#: Stands for a space in the vocabulary.
SPACE = "\u2581"

#: Pieces up to this length are remembered.
_SHORT_CHARS = 32
#: Pieces up to this length are merged by looking at all pairs each time; longer ones use a heap.
_TINY_CHARS = 6 if NATIVE else 32
_CACHED_PIECES = 1 << 16


class SpmModel:
    """Tokens of one piece of raw text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        scores = vocabulary.scores or [0.0] * len(vocabulary)
        never = {token for token, kind in enumerate(vocabulary.types) if kind in CONTROL_TYPES}
        self._ids: dict[str, int] = {text: token for text, token in vocabulary.index.items() if token not in never}
        self._scores: dict[str, float] = {text: scores[token] for text, token in self._ids.items()}
        self._bytes = [_byte_token(byte, vocabulary) for byte in range(256)]
        self._add_space_prefix = vocabulary.add_space_prefix
        self._words = re.compile(f"(?<![{_before_space(self._ids)}])(?={SPACE})")
        self._cache: dict[str, list[int]] = {}
        self._inner_pairs: frozenset[str] | None = None
        self._merge_long: Callable[[str], list[str]] | None = None

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of `text`, which stands at the start or behind a special token when `after_special`.

        Bytes that are not UTF-8 may be in it, escaped as in `vocab`; they become byte tokens.
        """
        if self._add_space_prefix and after_special:
            text = " " + text
        tokens: list[int] = []
        for word in self._words.split(text.replace(" ", SPACE)):
            tokens += self._cached(word) if len(word) <= _SHORT_CHARS else self._long(word)
        return tokens

    def _cached(self, word: str) -> list[int]:
        known = self._cache.get(word)
        if known is None:
            if len(self._cache) >= _CACHED_PIECES:
                self._cache.clear()
            known = self._cache[word] = self._tokens(self._merge(word))
        return known

    def _long(self, word: str) -> list[int]:
        if NATIVE:  # which cuts by the same rule
            return self._tokens(self._merge(word))
        tokens: list[int] = []
        for piece in self._cut(word):
            tokens += self._cached(piece) if len(piece) <= _SHORT_CHARS else self._tokens(self._merge(piece))
        return tokens

    def _merge(self, piece: str) -> Sequence[str]:
        if len(piece) <= _TINY_CHARS:
            return _merge_short(list(piece), self._scores)
        if self._merge_long is None:
            self._merge_long = merger(self._scores)
        return self._merge_long(piece)

    def _cut(self, word: str) -> list[str]:
        """Cut between two characters that stand side by side in no token: nothing can ever merge across."""
        if self._inner_pairs is None:
            pairs: set[str] = set()
            for text in self._ids:
                pairs.update(map(add, text, text[1:]))
            self._inner_pairs = frozenset(pairs)
        inner = self._inner_pairs
        cuts = [i for i, pair in enumerate(map(add, word, word[1:]), 1) if pair not in inner]
        return [word[a:b] for a, b in zip([0, *cuts], [*cuts, len(word)], strict=True)]

    def _tokens(self, symbols: Sequence[str]) -> list[int]:
        tokens: list[int] = []
        for symbol in symbols:
            token = self._ids.get(symbol)
            if token is not None:
                tokens.append(token)
            else:
                spelled = (self._bytes[byte] for byte in symbol.encode("utf-8", "surrogateescape"))
                tokens += [token for token in spelled if token is not None]
        return tokens


def _byte_token(byte: int, vocabulary: Vocabulary) -> int | None:
    token = vocabulary.index.get(f"<0x{byte:02X}>")
    if token is None:
        token = vocabulary.index.get(bytes([byte]).decode("utf-8", "surrogateescape"))
    return vocabulary.ids.unknown if token is None else token


def _before_space(texts: Mapping[str, int]) -> str:
    """Characters that stand right before a space inside some token, ready for a character class."""
    found = {text[at - 1] for text in texts for at in _inner_spaces(text)}
    return "".join(re.escape(char) for char in sorted(found)) or "\0"


def _inner_spaces(text: str) -> list[int]:
    return [at for at in range(1, len(text)) if text[at] == SPACE] if SPACE in text[1:] else []


def _merge_short(symbols: list[str], scores: Mapping[str, float]) -> list[str]:
    """Merge in place by looking at every pair each time; quadratic, and fastest for a word."""
    while True:
        best_at, best_score = -1, -float("inf")
        for at, pair in enumerate(map(add, symbols, symbols[1:])):
            score = scores.get(pair)
            if score is not None and (score > best_score or best_at < 0):
                best_at, best_score = at, score
        if best_at < 0:
            return symbols
        symbols[best_at : best_at + 2] = [symbols[best_at] + symbols[best_at + 1]]


def merger(scores: dict[str, float]) -> Callable[[str], list[str]]:
    """What merges long pieces, ready for these scores."""
    if not NATIVE:
        return lambda piece: merge_long(piece, scores)
    table = _merge.Scores(scores)

    def merge(piece: str) -> list[str]:
        ends = list(accumulate(table.merge(piece)))
        return [piece[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    return merge


def merge_long(piece: str, scores: Mapping[str, float]) -> list[str]:
    """The same in n log n: a heap of candidates; one is stale when the lengths at its place no longer add up."""
    symbols: list[str] = list(piece)
    following = [*range(1, len(symbols)), -1]
    previous = [*range(-1, len(symbols) - 1)]
    heap = [
        (-score, at, 2)
        for at, pair in enumerate(map(add, symbols, symbols[1:]))
        if (score := scores.get(pair)) is not None
    ]
    heapq.heapify(heap)
    while heap:
        _, at, n_chars = heapq.heappop(heap)
        left = symbols[at]
        right_at = following[at]
        if not left or right_at < 0 or len(left) + len(symbols[right_at]) != n_chars:
            continue
        merged = symbols[at] = left + symbols[right_at]
        symbols[right_at] = ""
        after = following[at] = following[right_at]
        if after >= 0:
            previous[after] = at
            score = scores.get(merged + symbols[after])
            if score is not None:
                heapq.heappush(heap, (-score, at, n_chars + len(symbols[after])))
        before = previous[at]
        if before >= 0:
            score = scores.get(symbols[before] + merged)
            if score is not None:
                heapq.heappush(heap, (-score, before, len(symbols[before]) + n_chars))
    return [symbol for symbol in symbols if symbol]
