"""Each filter against a plain re-telling of its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.serving import filters
from app.engine.serving.filters import OUT, Race
from app.engine.serving.weights import ONE, Distances, total_surprise, weigh

Pairs = list[tuple[int, float]]

values = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 2.25, 4.0]), min_size=1, max_size=12)
shares = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 0.77, 0.9, 0.99])
keeps = st.integers(1, 4)


def race_of(logits: list[float]) -> tuple[Distances, Pairs]:
    """Distances by id, and (id, logit) from the best token down."""
    array = np.array(logits, dtype=np.float32)
    items = sorted(enumerate(logits), key=lambda item: (-item[1], item[0]))
    return array.max() - array, items


def left(distances: Distances, items: Pairs) -> Pairs:
    """The items that are still in the race, in their order."""
    return [item for item in items if distances[item[0]] < OUT]


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
    distances, items = race_of(logits)
    if is_clear(list(np.cumsum(softmax(items))), p):
        assert left(filters.top_p(distances, p, keep), items) == reference_top_p(items, p, keep)


@settings(max_examples=150, deadline=None)
@given(values, shares, keeps)
def test_near_is_min_p(logits: list[float], p: float, keep: int) -> None:
    distances, items = race_of(logits)
    assert left(filters.near(distances, -math.log(p), keep), items) == reference_min_p(items, p, keep)


@settings(max_examples=50, deadline=None)
@given(values, st.integers(1, 15))
def test_best(logits: list[float], n: int) -> None:
    distances, items = race_of(logits)
    assert left(filters.best(distances, n), items) == items[:n]


@settings(max_examples=150, deadline=None)
@given(values, shares, keeps)
def test_typical(logits: list[float], p: float, keep: int) -> None:
    distances, items = race_of(logits)
    if len(set(logits)) == len(logits):  # equal surprises may add up in either order
        assert left(filters.typical(distances, p, keep), items) == reference_typical(items, p, keep)


@settings(max_examples=150, deadline=None)
@given(values, st.sampled_from([0.01, 0.1, 0.2, 0.33, 0.48]), keeps)
def test_exclude_top(logits: list[float], threshold: float, keep: int) -> None:
    distances, items = race_of(logits)
    assert left(filters.exclude_top(distances, threshold, keep), items) == reference_xtc(items, threshold, keep)


def test_a_filter_looks_only_at_what_those_before_left() -> None:
    logits = np.array([0.0, 5.0, 1.0, 4.0, 2.0, 3.0], dtype=np.float32)
    without_best = np.where(logits == 5.0, OUT, logits.max() - logits).astype(np.float32)
    assert np.flatnonzero(filters.best(without_best, 2) < OUT).tolist() == [3, 5]
    assert np.flatnonzero(filters.near(without_best, 1.0, 1) < OUT).tolist() == [3, 5]
    assert np.flatnonzero(filters.top_p(without_best, 0.6, 1) < OUT).tolist() == [3]


def test_draw_walks_the_cumulative_distribution_by_id() -> None:
    logits = np.log(np.array([1, 5, 2], dtype=np.float32))
    drawn = [filters.draw(logits, Race(), u) for u in (0.0, 0.124, 0.126, 0.749, 0.751, 0.9999999)]
    assert [token for token, _ in drawn] == [0, 0, 1, 1, 2, 2]
    assert [share for _, share in drawn] == pytest.approx([1 / 8, 1 / 8, 5 / 8, 5 / 8, 2 / 8, 2 / 8])
    assert filters.draw(logits, Race(scale=1e5), 0.999999) == (1, 1.0)


def test_weights_are_exponentials() -> None:
    distances = np.linspace(0, 60, 20_011, dtype=np.float32)
    found = weigh(distances).astype(np.float64)
    assert found[0] == ONE
    assert np.abs(found - ONE * np.exp(-distances.astype(np.float64)))[distances < 20].max() < 4e-7 * ONE
    likely = distances < 14
    assert np.abs(found / (ONE * np.exp(-distances.astype(np.float64))) - 1)[likely].max() < 2e-6
    assert (np.diff(found) <= ONE * 1e-6).all() and (found[distances > 43] == 0).all() and weigh(OUT[None])[0] == 0


def test_surprise_is_the_expected_distance() -> None:
    distances = np.abs(np.random.default_rng(3).normal(0, 3, 5000)).astype(np.float32)
    weights = np.exp(-distances.astype(np.float64))
    mean = total_surprise(distances) / int(weigh(distances).sum())
    assert mean == pytest.approx(float(weights @ distances / weights.sum()), abs=1e-4)
