"""What a request's own tokens do to the logits: repetition, presence and frequency penalties, and DRY.

All count the prompt's tokens too, as llama-server does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.request import SamplingParams
from app.engine.serving.vocab_ops import Logits

#: A breaker's first token -> the token sequences that complete it (an empty one: the token alone is a breaker).
Breakers = Mapping[int, Sequence[tuple[int, ...]]]

#: Where the logits of tokens stand, for those that have any, and which those are; see `rows.Row.places`.
PlacesOf = Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], slice | NDArray[np.bool_]]]

#: The most tokens a breaker goes on for after its first one.
_MAX_TAIL = 20

#: log of the largest float32: penalties beyond it would overflow.
_MAX_LOG = 88.7228391
#: The most DRY takes away; a float32 is left whatever the logit was.
_MAX_PENALTY = 3e38


class History:
    """The tokens of one request so far, as an array that grows."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.array(list(tokens), dtype=np.int64)
        self._n = len(self._tokens)

    def __len__(self) -> int:
        return self._n

    def push(self, token: int) -> None:
        if self._n == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(max(64, self._n), dtype=np.int64)])
        self._tokens[self._n] = token
        self._n += 1

    def last(self, n: int) -> NDArray[np.int64]:
        """The last `n` tokens, oldest first; a negative `n` means all."""
        return self._tokens[max(0, self._n - n) if n >= 0 else 0 : self._n]


class RecentCounts:
    """How often each token occurs among the last `n_last` (negative: all)."""

    def __init__(self, history: History, n_last: int) -> None:
        self._n_last = n_last
        ids, counts = np.unique(history.last(n_last), return_counts=True)
        self._counts: dict[int, int] = dict(zip(ids.tolist(), counts.tolist(), strict=True))

    def push(self, history: History) -> None:
        """The history has just got one token more."""
        window = history.last(self._n_last + 1 if self._n_last >= 0 else -1)
        newest = int(window[-1])
        self._counts[newest] = self._counts.get(newest, 0) + 1
        if 0 <= self._n_last < len(window):
            oldest = int(window[0])
            self._counts[oldest] -= 1
            if self._counts[oldest] == 0:
                del self._counts[oldest]

    def __len__(self) -> int:
        """How many different tokens there are."""
        return len(self._counts)

    def penalize(self, logits: Logits, places_of: PlacesOf, params: SamplingParams) -> None:
        """Repetition, presence and frequency penalties, in place; `places_of` tells where tokens' logits stand."""
        n = len(self._counts)
        ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=n)
        counts = np.fromiter(self._counts.values(), dtype=np.float32, count=n)
        places, present = places_of(ids)
        values = logits[places]
        repeat = np.float32(params.repeat_penalty)
        values = np.where(values <= 0, values * repeat, values / repeat)
        penalties = counts[present] * np.float32(params.frequency_penalty)
        logits[places] = values - penalties - np.float32(params.presence_penalty)


class Dry:
    """DRY: a token that would extend a repetition of the text's end is held back, exponentially in its length.

    `dry_allowed_length` tokens may repeat freely; sequence breakers end a repetition.
    """

    def __init__(self, params: SamplingParams, breakers: Breakers, n_vocab: int) -> None:
        self._params = params
        self._breakers = breakers
        self._is_head = np.zeros(n_vocab, dtype=np.bool_)
        self._is_head[list(breakers)] = True
        base = params.dry_base
        self._most = params.dry_allowed_length + (int(_MAX_LOG / math.log(base)) if base > 1.000001 else 0)

    def penalize(self, logits: Logits, history: History) -> None:
        """Lower the logits of tokens that would go on with a repetition, in place."""
        params = self._params
        window, allowed = history.last(params.dry_penalty_last_n), params.dry_allowed_length
        longest = min(self._since_breaker(window), len(window) - 1)
        if longest < max(1, allowed):
            return
        places, lengths = _repeats(window, min(longest, self._most))
        far_enough = lengths >= allowed
        strongest: dict[int, int] = {}
        for token, length in zip(window[places[far_enough] + 1].tolist(), lengths[far_enough].tolist(), strict=True):
            strongest[token] = max(length, strongest.get(token, 0))
        for token, length in strongest.items():
            if () not in self._breakers.get(token, ()):
                penalty = params.dry_multiplier * params.dry_base ** (length - allowed)
                logits[token] -= np.float32(min(penalty, _MAX_PENALTY))

    def _since_breaker(self, window: NDArray[np.int64]) -> int:
        """Tokens since the last breaker; the window's length when there is none in it."""
        for place in np.flatnonzero(self._is_head[window])[::-1].tolist():
            after = tuple(window[place + 1 :][:_MAX_TAIL].tolist())
            whole = [len(tail) for tail in self._breakers[int(window[place])] if after[: len(tail)] == tail]
            if whole:
                return int(len(window) - 1 - place - max(whole))
        return len(window)


def _repeats(window: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Earlier places where a suffix of the window ends as well, and how long that suffix is (at most `most`)."""
    end = len(window) - 1
    places = np.flatnonzero(window[:end] == window[end])
    lengths = np.ones(len(places), dtype=np.int64)
    alive = np.arange(len(places))
    for n in range(1, most):
        alive = alive[places[alive] >= n]
        alive = alive[window[places[alive] - n] == window[end - n]]
        if len(alive) == 0:
            break
        lengths[alive] += 1
    return places, lengths


def find_breakers(
    breakers: Sequence[str], pieces: Sequence[bytes], encode: Callable[[bytes], Sequence[int]]
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Every way in which tokens can spell a sequence breaker.

    `pieces` are the bytes of every token, by id; `encode` tokenizes plain text without special tokens. A token that
    contains the breaker is one alone; a token that ends in the breaker's beginning is one together with the tokens of
    the rest (the first 20 of them). Goes through the vocabulary once: keep the result.
    """
    whole = sorted({text.encode() for text in breakers if text})
    begun: dict[bytes, list[bytes]] = {}  # a beginning -> the breakers that go on from it
    for breaker in whole:
        for n in range(1, len(breaker)):
            begun.setdefault(breaker[:n], []).append(breaker)
    longest = max(map(len, begun), default=0)
    tails: dict[bytes, tuple[int, ...]] = {}
    shared: dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = {}  # many tokens have the same
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    for token, piece in enumerate(pieces):
        inside = [breaker for breaker in whole if breaker in piece]
        spelled: list[tuple[int, ...]] = [()] if inside else []
        for n in range(1, min(len(piece), longest) + 1):
            for breaker in begun.get(piece[-n:], ()):
                if breaker not in inside:
                    rest = breaker[n:]
                    if rest not in tails:
                        tails[rest] = tuple(encode(rest)[:_MAX_TAIL])
                    spelled.append(tails[rest])
        if spelled:
            ways = tuple(dict.fromkeys(spelled))
            found[token] = shared.setdefault(ways, ways)
    return found
