"""Cases of softmax, and what attention shares with it."""

from __future__ import annotations

import math

import numpy as np

from app.engine.ggml import GGMLType, Op
from tests.contract.cases import F16, F32, INF, NAN, CaseBuilder, Values, op_case


def slope(head: int, heads: int, max_bias: float) -> float:
    if max_bias == 0:
        return 1.0
    n = 1 << (heads.bit_length() - 1)
    return 2 ** (-max_bias / n * (head + 1)) if head < n else 2 ** (-max_bias / 2 / n * (2 * (head - n) + 1))


def softmax(z: Values, sink: float | None = None) -> Values:
    """One row; all hidden gives zeros."""
    if np.isneginf(z).all():
        return np.zeros_like(z)
    top = max(z.max(), -INF if sink is None else sink)
    e = np.exp(z - top)
    return e / (e.sum() + (0 if sink is None else math.exp(sink - top)))


@op_case(
    "soft-max",
    ("plain", None, 0.0, False),
    ("mask", F32, 0.0, False),
    ("mask", F16, 0.0, True),
    ("alibi", F16, 8.0, False),
    ("alibi", F32, 4.0, True),
)
def soft_max(c: CaseBuilder, _: str, mask_type: GGMLType | None, max_bias: float, with_sinks: bool) -> None:
    """Six heads (not a power of two), a mask with one plane for every three heads and more rows than needed."""
    n, m, heads, b = 9, 4, 6, 2
    a = c.random(F32, n, m, heads, b)
    values = np.where(c.rng.uniform(size=(1, 3, m + 2, n)) < 0.4, -np.inf, -c.rng.integers(0, 5, (1, 3, m + 2, n)))
    values[0, 1, 2] = -np.inf  # one row sees nothing
    mask = None if mask_type is None else c.leaf(mask_type, values)
    sinks = c.random(F32, heads) if with_sinks else None
    x, want = c.values(a), np.empty((b, heads, m, n))
    for i, h, row in np.ndindex(b, heads, m):
        z = 0.7 * x[i, h, row]
        if mask is not None:
            z = z + slope(h, heads, max_bias) * values[0, h % 3, row]
        want[i, h, row] = softmax(z, None if sinks is None else float(c.values(sinks)[0, 0, 0, h]))
    c.expect(c.node(Op.SOFT_MAX, F32, a.ne, (a, mask, sinks), (0.7, max_bias)), want)


@op_case("soft-max-hides-nan")
def soft_max_hides_nan(c: CaseBuilder) -> None:
    """Scores of stale cells may be NaN; the mask takes them out."""
    a = c.leaf(F32, np.array([[1.0, NAN, 2.0], [INF, 3.0, NAN]]))
    mask = c.leaf(F32, np.array([[0, -INF, 0], [-INF, 0, -INF]]))
    e = math.exp(-1)
    want = np.array([[e / (1 + e), 0, 1 / (1 + e)], [0, 1, 0]])
    c.expect(c.node(Op.SOFT_MAX, F32, (3, 2), (a, mask), (1.0, 0.0)), want)


@op_case("soft-max-in-place")
def soft_max_in_place(c: CaseBuilder) -> None:
    a = c.random(F32, 7, 3)
    want = np.array([softmax(2 * row) for row in c.values(a)[0, 0]])
    c.expect(c.node(Op.SOFT_MAX, F32, (7, 3), (a,), (2.0, 0.0), alias=a), want)
