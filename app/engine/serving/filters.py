"""The filters that thin out tokens, and the draw, one function each; defaults and order are llama.cpp's.

The tokens still in the race are float32 distances from the best one (see `weights`), in order of id; a filter sets
others to infinity. At least `min_keep` tokens survive each. Of equal tokens the lower id is the better one. This is the
reference: the native kernel does the same without sorting, and draws the same tokens bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.serving.weights import Distances, scaled, total_surprise, weigh

OUT = np.float32(np.inf)

#: XTC leaves the best token alone where two cannot both have this probability.
XTC_LARGEST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Which tokens a draw is between, and how: the filters in their order. The defaults switch each of them off.

    `reach` is how many nats below the best one left a token may lie (min-p is log(1 / p)). `scale` is 1 / temperature.
    """

    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    reach: float = math.inf
    xtc_threshold: float = 1.0
    min_keep: int = 1
    scale: float = 1.0


def draw(logits: NDArray[np.float32], race: Race, u: float) -> tuple[int, float]:
    """The token at `u` in [0, 1) of the cumulative distribution of those left, by id; and its probability there.

    At least one logit of float32[n_vocab] is finite, none is NaN or +infinity.
    """
    distances = logits.max() - logits
    keep = max(race.min_keep, 1)
    if 0 < race.top_k < len(logits):
        # By logit, as a record of the row was made: distances are rounded.
        distances = _first(distances, -logits, 0, race.top_k)
    if race.typical_p < 1.0:
        distances = typical(distances, race.typical_p, keep)
    if race.top_p < 1.0:
        distances = top_p(distances, race.top_p, keep)
    if race.reach < math.inf:
        distances = near(distances, race.reach, keep)
    if race.xtc_threshold <= XTC_LARGEST:
        distances = exclude_top(distances, race.xtc_threshold, keep)
    held = np.cumsum(weigh(scaled(distances - distances.min(), race.scale)))
    total = int(held[-1])
    mark = min(int(u * float(total)), total - 1)
    token = int(np.searchsorted(held, np.uint64(mark), side="right"))
    weight = int(held[token]) - (int(held[token - 1]) if token else 0)
    return token, weight / total


def best(distances: Distances, n: int) -> Distances:
    """The `n` best (top-k)."""
    return _first(distances, distances, 0, n)


def typical(distances: Distances, p: float, min_keep: int) -> Distances:
    """Locally typical: those whose surprise is closest to the expected one, until they hold more than `p` together."""
    total = int(weigh(distances).sum())
    mean = np.float32(total_surprise(distances) / total)
    away = np.where(distances < OUT, np.abs(distances - mean), OUT)
    return _first(distances, away, math.floor(p * float(total)) + 1, min_keep)


def top_p(distances: Distances, p: float, min_keep: int) -> Distances:
    """The fewest best ones that hold `p` together."""
    total = int(weigh(distances).sum())
    return _first(distances, distances, math.ceil(p * float(total)), min_keep)


def near(distances: Distances, reach: float, min_keep: int) -> Distances:
    """Those within `reach` nats of the best one (min-p, and mirostat's limit of surprise)."""
    limit = distances.min() + np.float32(reach)
    is_near = (distances <= limit) & (distances < OUT)
    if np.count_nonzero(is_near) < min_keep:
        return best(distances, min_keep)
    return np.where(is_near, distances, OUT)


def exclude_top(distances: Distances, threshold: float, min_keep: int) -> Distances:
    """XTC: of those with at least `threshold` only the least likely stays. The caller draws whether."""
    weights = weigh(distances)
    least = max(math.ceil(threshold * float(int(weights.sum()))), 1)
    n_heavy = int(np.count_nonzero(weights >= np.uint64(least)))
    n_left = int(np.count_nonzero(distances < OUT)) - (n_heavy - 1)
    if n_heavy < 2 or n_left < min_keep:
        return distances
    dropped = _first(distances, distances, 0, n_heavy - 1) < OUT
    return np.where(dropped, OUT, distances)


def _first(distances: Distances, order: Distances, weight: int, count: int) -> Distances:
    """The fewest first ones by `order` that weigh `weight` together and are `count` or more."""
    ranked = np.argsort(order, kind="stable")
    held = np.cumsum(weigh(distances[ranked]))
    n = max(int(np.searchsorted(held, np.uint64(weight), side="left")) + 1 if weight else 0, count)
    kept = np.full_like(distances, OUT)
    kept[ranked[:n]] = distances[ranked[:n]]
    return kept
