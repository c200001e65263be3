"""The filters that thin out candidates, one function each; defaults and order are llama.cpp's.

Each takes candidates by decreasing logit and returns them so. `min_keep` candidates always survive.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.serving.vocab_ops import Candidates, Logits, at_least, log_total, top


def probabilities(candidates: Candidates, temperature: float = 1.0) -> NDArray[np.float64]:
    """Softmax over the candidates alone."""
    weights = np.exp((candidates.logits - candidates.logits[0]) / temperature)
    return np.asarray(weights / weights.sum())


def typical(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Locally typical: those whose surprise is closest to the expected one, until they hold more than `p` together."""
    if p >= 1.0:
        return candidates
    probs = probabilities(candidates)
    surprise = -np.log(np.maximum(probs, np.finfo(np.float64).tiny))
    entropy = float(np.dot(probs, surprise))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    held = np.cumsum(probs[order])
    n = max(int(np.searchsorted(held, p, side="right")) + 1, min_keep, 1)
    kept = np.sort(order[:n])
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def top_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """The fewest best ones that hold `p` together."""
    if p >= 1.0:
        return candidates
    held = np.cumsum(probabilities(candidates))
    return candidates.first(max(int(np.searchsorted(held, p, side="left")) + 1, min_keep, 1))


def min_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Those at least `p` times as likely as the best one."""
    if p <= 0.0:
        return candidates
    floor = candidates.logits[0] + math.log(p)
    n = int(np.searchsorted(-candidates.logits, -floor, side="right"))
    return candidates.first(max(n, min_keep, 1))


def xtc(candidates: Candidates, threshold: float, min_keep: int) -> Candidates:
    """Exclude top choices: of those with at least `threshold` only the least likely stays. The caller draws whether."""
    if threshold > 0.5 or len(candidates) < 2:
        return candidates
    n_dropped = int(np.count_nonzero(probabilities(candidates) >= threshold)) - 1
    if n_dropped < 1 or len(candidates) - n_dropped < min_keep:
        return candidates
    return Candidates(candidates.ids[n_dropped:], candidates.logits[n_dropped:])


def nucleus(logits: Logits, p: float, min_keep: int) -> Candidates:
    """`top_p` over the whole vocabulary. Sorts all of it only where the best 2,048 tokens do not hold `p` together."""
    total = log_total(logits)
    for n in (256, 2048, len(logits)):
        head = top(logits, max(n, min_keep))
        held = np.cumsum(np.exp(head.logits - total))
        if held[-1] >= p:
            break
    return head.first(max(int(np.searchsorted(held, p, side="left")) + 1, min_keep, 1))


def likely(logits: Logits, p: float, min_keep: int) -> Candidates:
    """`min_p` over the whole vocabulary."""
    found = at_least(logits, float(logits.max()) + math.log(min(p, 1.0)))
    return found if len(found) >= min_keep else top(logits, min_keep)


def draw(candidates: Candidates, temperature: float, u: float) -> int:
    """The place of the candidate at `u` in [0, 1) of the cumulative distribution softmax(logits / temperature)."""
    held = np.cumsum(probabilities(candidates, temperature))
    return min(int(np.searchsorted(held, u * held[-1], side="right")), len(candidates) - 1)
