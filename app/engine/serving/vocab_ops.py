"""The steps of sampling that touch the whole vocabulary, each in a few passes of numpy.

This is the seam for a native kernel: everything after these works on a handful of candidates. `logits` are
float32[n_vocab]; ties always go to the lower token id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

#: Below this many tokens sorting everything is as cheap as being clever.
_SMALL = 2048
#: Vocabulary entries per group when looking for the largest ones.
_GROUP = 64


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens still in the race, by decreasing logit, equal ones by id. `ids` int64[n], `logits` float64[n]."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int) -> Candidates:
        return self if n >= len(self) else Candidates(self.ids[:n], self.logits[:n])


def ranked(logits: Logits, ids: NDArray[np.int64]) -> Candidates:
    """The tokens `ids` (ascending) in order."""
    values = logits[ids]
    if len(ids) < _SMALL:
        order = np.argsort(-values, kind="stable")
        return Candidates(ids[order], values[order].astype(np.float64))
    bits = (values + np.float32(0.0)).view(np.uint32)  # adding zero makes -0.0 and 0.0 the same
    falling = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF))  # as integers, larger floats come first
    keys = np.sort((falling.astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64))  # faster than an argsort
    ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return Candidates(ids, logits[ids].astype(np.float64))


def at_least(logits: Logits, floor: float) -> Candidates:
    """Every token whose logit is `floor` or more."""
    return ranked(logits, np.flatnonzero(logits >= floor))


def top(logits: Logits, k: int) -> Candidates:
    """The `k` largest (all, if there are fewer).

    The k-th largest of the maxima of disjoint groups is a floor that at least k tokens reach and few others do; so one
    pass for maxima and one for the comparison replace a selection over the vocabulary.
    """
    n = len(logits)
    n_groups = n // _GROUP
    if n <= _SMALL or k > n_groups // 2:
        return ranked(logits, np.arange(n)).first(k)
    whole = logits[: n_groups * _GROUP].reshape(_GROUP, n_groups)  # strided groups: the maximum runs along rows
    floor = np.partition(whole.max(axis=0), n_groups - k)[n_groups - k]
    return at_least(logits, float(floor)).first(k)


def log_total(logits: Logits, scale: float = 1.0) -> float:
    """log(sum(exp(logits * scale))), safe for any finite peak."""
    peak = float(logits.max())
    weights = _weights(logits, np.float32(peak), np.float32(scale))
    return peak * scale + float(np.log(weights.sum(dtype=np.float64)))


def _weights(logits: Logits, peak: np.float32, scale: np.float32) -> Logits:
    """exp((logits - peak) * scale), in one array: fresh memory costs more than the arithmetic."""
    weights: Logits = logits - peak
    weights *= scale
    np.exp(weights, out=weights)
    return weights


def draw_from_all(logits: Logits, temperature: float, u: float) -> int:
    """The token at `u` in [0, 1) of the cumulative distribution softmax(logits / temperature), in order of id."""
    weights = _weights(logits, logits.max(), np.float32(1.0 / temperature))
    starts = np.arange(0, len(weights), 1024)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    mark = u * sums[-1]
    group = min(int(np.searchsorted(sums, mark, side="right")), len(starts) - 1)
    below = sums[group - 1] if group else 0.0
    part = np.cumsum(weights[starts[group] : starts[group] + 1024], dtype=np.float64)
    place = int(np.searchsorted(part, mark - below, side="right"))
    if place == len(part):  # the mark fell into the rounding between the two sums
        place = int(np.flatnonzero(weights[starts[group] : starts[group] + 1024])[-1])
    return int(starts[group]) + place
