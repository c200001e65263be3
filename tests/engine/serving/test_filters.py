"""Each filter against a plain re-telling of its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.engine.serving import filters
from app.engine.serving.vocab_ops import Candidates, top

Pairs = list[tuple[int, float]]

values = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 2.25, 4.0]), min_size=1, max_size=12)
shares = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 0.77, 0.9, 0.99, 1.0])
keeps = st.integers(0, 4)


def candidates(logits: list[float]) -> tuple[Candidates, Pairs]:
    array = np.array(logits, dtype=np.float32)
    found = top(array, len(array))
    return found, pairs(found)


def pairs(found: Candidates) -> Pairs:
    return list(zip(found.ids.tolist(), found.logits.tolist(), strict=True))


def softmax(items: Pairs) -> list[float]:
    weights = [math.exp(logit) for _, logit in items]
    return [w / sum(weights) for w in weights]


def is_clear(sums: list[float], p: float) -> bool:
    """Whether rounding cannot decide: no partial sum lies on the threshold."""
    return all(abs(s - p) > 1e-9 for s in sums)


def reference_top_p(items: Pairs, p: float, min_keep: int) -> Pairs:
    held = 0.0
    for i, prob in enumerate(softmax(items)):
        held += prob
        if held >= p and i + 1 >= min_keep:
            return items[: i + 1]
    return items


def reference_min_p(items: Pairs, p: float, min_keep: int) -> Pairs:
    kept = [item for item in items if item[1] >= items[0][1] + math.log(p)]
    return kept if len(kept) >= min_keep else items[:min_keep]


def reference_typical(items: Pairs, p: float, min_keep: int) -> Pairs:
    probs = softmax(items)
    entropy = -sum(q * math.log(q) for q in probs)
    order = sorted(range(len(items)), key=lambda i: (round(abs(-math.log(probs[i]) - entropy), 12), i))
    held, kept = 0.0, []
    for i in order:
        held += probs[i]
        kept.append(i)
        if held > p and len(kept) >= min_keep:
            break
    return [items[i] for i in sorted(kept)]


def reference_xtc(items: Pairs, threshold: float, min_keep: int) -> Pairs:
    above = [i for i, q in enumerate(softmax(items)) if q >= threshold]
    if threshold > 0.5 or len(above) < 2 or len(items) - (len(above) - 1) < min_keep:
        return items
    return items[above[-1] :]


@settings(max_examples=150, deadline=None)
@given(values, shares, keeps)
def test_top_p(logits: list[float], p: float, keep: int) -> None:
    found, items = candidates(logits)
    if p == 1.0 or is_clear(list(np.cumsum(softmax(items))), p):
        assert pairs(filters.top_p(found, p, keep)) == (items if p == 1.0 else reference_top_p(items, p, keep))


@settings(max_examples=150, deadline=None)
@given(values, shares, keeps)
def test_min_p(logits: list[float], p: float, keep: int) -> None:
    found, items = candidates(logits)
    assert pairs(filters.min_p(found, p, keep)) == reference_min_p(items, p, keep)
    assert pairs(filters.min_p(found, 0.0, keep)) == items


@settings(max_examples=150, deadline=None)
@given(values, shares, keeps)
def test_typical(logits: list[float], p: float, keep: int) -> None:
    found, items = candidates(logits)
    if len(set(logits)) == len(logits):  # equal surprises may add up in either order
        assert pairs(filters.typical(found, p, keep)) == (items if p == 1.0 else reference_typical(items, p, keep))


@settings(max_examples=150, deadline=None)
@given(values, st.sampled_from([0.01, 0.1, 0.2, 0.33, 0.5, 0.6]), keeps)
def test_xtc(logits: list[float], threshold: float, keep: int) -> None:
    found, items = candidates(logits)
    assert pairs(filters.xtc(found, threshold, keep)) == reference_xtc(items, threshold, keep)


def spread(seed: int, n: int, width: float) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(0, width, n)).astype(np.float32)


@pytest.mark.parametrize("width", [0.1, 2.0, 6.0])  # flat, usual, peaked
@pytest.mark.parametrize("p", [0.1, 0.9, 0.999])
def test_nucleus_over_a_vocabulary_is_top_p_over_all_of_it(width: float, p: float) -> None:
    logits = spread(1, 6000, width)
    by_sorting = filters.top_p(top(logits, len(logits)), p, 0)
    found = filters.nucleus(logits, p, 0)
    assert abs(len(found) - len(by_sorting)) <= 1  # the sums are rounded differently
    n = min(len(found), len(by_sorting))
    assert found.ids[:n].tolist() == by_sorting.ids[:n].tolist()
    assert len(filters.nucleus(logits, 1e-9, 3)) == 3


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 1.0])
def test_likely_over_a_vocabulary_is_min_p_over_all_of_it(p: float) -> None:
    logits = spread(2, 6000, 2.0)
    assert pairs(filters.likely(logits, p, 5)) == pairs(filters.min_p(top(logits, len(logits)), p, 5))


def test_draw_walks_the_cumulative_distribution() -> None:
    found, items = candidates([0.0, math.log(2), math.log(5)])  # weights 5, 2, 1
    assert [i for i, _ in items] == [2, 1, 0]
    assert [filters.draw(found, 1.0, u) for u in (0.0, 0.62, 0.63, 0.87, 0.88, 0.999999999)] == [0, 0, 1, 1, 2, 2]
    assert filters.draw(found, 1e-5, 0.999999) == 0
