"""Whole-vocabulary steps against the obvious way to do them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.engine.serving import filters, vocab_ops
from app.engine.serving.filters import Race
from app.engine.serving.randomness import uniform
from app.engine.serving.vocab_ops import best, draw, log_total, top
from app.engine.serving.weights import ONE


def some_logits(seed: int, n: int, *, n_values: int = 0) -> NDArray[np.float32]:
    """Random logits; with `n_values` they take few values, so that there are ties everywhere."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, n).astype(np.float32)
    return logits if not n_values else rng.choice(logits[:n_values], n)


def in_order(logits: NDArray[np.float32]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.one_of(st.integers(1, 300), st.integers(2000, 9000)),
    k=st.integers(1, 200),
    n_values=st.sampled_from([0, 1, 5, 60]),
)
def test_top_is_the_head_of_the_sorted_vocabulary(seed: int, n: int, k: int, n_values: int) -> None:
    logits = some_logits(seed, n, n_values=min(n, n_values))
    assert top(logits, k) == in_order(logits)[:k]
    assert best(logits) == (in_order(logits)[0], False)


def test_top_of_a_vocabulary_that_is_mostly_forbidden() -> None:
    logits = np.full(50_000, -np.inf, dtype=np.float32)
    logits[[7, 40_000]] = 1.0
    assert top(logits, 40)[:2] == [7, 40_000]


@pytest.mark.parametrize("n", [100, 5000])
def test_both_zeros_are_alike(n: int) -> None:
    logits = np.zeros(n, dtype=np.float32)
    logits[::2] = -0.0
    logits[n - 1] = 1e-30
    assert top(logits, n) == [n - 1, *range(n - 1)]
    assert best(logits)[0] == n - 1
    logits[n - 1] = -0.0
    assert best(logits)[0] == 0


def test_top_orders_floats_of_every_size() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.normal(0, 1, 5000) * 10.0 ** rng.integers(-40, 38, 5000)).astype(np.float32)
    logits[5] = -np.inf
    assert top(logits, 5000) == in_order(logits)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_anywhere_is_told(sign: float) -> None:
    logits = some_logits(1, 3000)
    logits[1234] = math.copysign(math.nan, sign)
    assert best(logits)[1]


@pytest.mark.parametrize("scale", [1.0, 0.5, 4.0])
def test_log_total(scale: float) -> None:
    logits = some_logits(5, 20_000)
    exact = math.log(sum(math.exp(float(x) * scale) for x in logits))
    assert log_total(logits, scale) == pytest.approx(exact, abs=2e-5)
    assert log_total(logits + np.float32(1000), scale) == pytest.approx(exact + 1000 * scale, abs=1e-2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 5000), u=st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_distribution(seed: int, n: int, u: float) -> None:
    logits = some_logits(seed, n)
    logits[0] = -np.inf if n > 1 else 0.0
    token, share = draw(logits, Race(scale=1 / 0.7), u)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.7)
    held = np.cumsum(weights) / weights.sum()
    assert weights[token] > 0
    assert share == pytest.approx(weights[token] / weights.sum(), rel=1e-4, abs=1e-9)
    assert held[token] >= u - 1e-5
    assert held[token] - weights[token] / weights.sum() <= u + 1e-5


def test_logits_next_to_each_other_are_ranked_as_they_are() -> None:
    """Their distances from the best one round to the same."""
    logits = (np.arange(3000, dtype=np.float32) * np.float32(1e-7)).astype(np.float32)
    logits[7] = 10.0
    for k in (5, 400):
        drawn = {draw(logits, Race(top_k=k, scale=1e-3), u / 100)[0] for u in range(100)}
        assert drawn <= {7, *range(3000 - k, 3000)} and len(drawn) > 4


def test_a_range_next_to_nothing_is_drawn_from() -> None:
    for n in (100, 5000):
        logits = np.zeros(n, dtype=np.float32)
        logits[5] = 1e-38
        for race in (Race(top_p=0.0), Race(top_p=0.5), Race(typical_p=0.5, top_p=0.0), Race(top_k=70, top_p=0.0)):
            assert draw(logits, race, 0.3) == filters.draw(logits, race, 0.3)


races = st.builds(
    Race,
    top_k=st.sampled_from([0, 1, 5, 40, 1000, 9000]),
    typical_p=st.sampled_from([1.0, 0.2, 0.9, 0.99]),
    top_p=st.sampled_from([1.0, 0.0, 0.01, 0.5, 0.95, 0.999999]),
    reach=st.sampled_from([math.inf, 3.0, 0.5, 0.0, -1.0]),
    xtc_threshold=st.sampled_from([1.0, 0.5, 0.1, 0.001, 0.0]),
    min_keep=st.sampled_from([1, 3, 100]),
    scale=st.sampled_from([1.0, 0.5, 1.25, 1e5]),
)


@pytest.mark.skipif(not vocab_ops.NATIVE, reason="the native sampling module is not built")
@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    n=st.sampled_from([1, 2, 63, 64, 65, 1025, 9000]),
    width=st.sampled_from([0.0, 1e-38, 1e-6, 0.3, 3.0, 300.0]),
    n_values=st.sampled_from([0, 0, 7]),
    n_forbidden=st.sampled_from([0, 0.9]),
    race=races,
    u=st.floats(0, 1, exclude_max=True),
)
def test_native_code_and_numpy_draw_the_same_bit_for_bit(
    seed: int, n: int, width: float, n_values: int, n_forbidden: float, race: Race, u: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, width, n).astype(np.float32)
    if n_values:
        logits = rng.choice(logits[:n_values], n)
    logits[rng.random(n) < n_forbidden] = -np.inf
    logits[rng.integers(n)] = -3e38
    logits[rng.integers(n)] = 0.5
    assert draw(logits, race, u) == filters.draw(logits, race, u)
    assert top(logits, 50) == vocab_ops.top_numpy(logits, 50)
    assert best(logits) == vocab_ops.best_numpy(logits)
    for scale in (1.0, race.scale):
        peak, total = vocab_ops.total_weight_numpy(logits, scale)
        assert log_total(logits, scale) == peak * scale + math.log(total / ONE)


def test_random_numbers_depend_on_seed_position_and_stream_alone() -> None:
    assert uniform(42, 7) == uniform(42, 7)
    assert uniform(-1, 7) == uniform(2**64 - 1, 7)
    numbers = {uniform(s, p, t) for s in range(10) for p in range(100) for t in range(2)}
    assert len(numbers) == 2000
    assert all(0 <= x < 1 for x in numbers)


@pytest.mark.parametrize("along", ["positions", "seeds", "streams"])
def test_random_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    n = 20_000
    draw = {
        "positions": lambda i: uniform(1, i),
        "seeds": lambda i: uniform(i, 1),
        "streams": lambda i: uniform(3, i // 2, i % 2),
    }[along]
    x = np.array([draw(i) for i in range(n)])
    counts = np.bincount((x * 50).astype(int), minlength=50)
    chi_squared = float(((counts - n / 50) ** 2 / (n / 50)).sum())
    assert 20 < chi_squared < 95  # 49 degrees of freedom: 1e-4 on either side
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.03
