"""Sums, means, prefix sums and arg max over rows."""

from __future__ import annotations

import numpy as np

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.ggml import Op


def _sum(n: Node) -> Step:
    x, out = n.src(0).array, n.out.array
    return lambda: np.copyto(out, x.sum(dtype=np.float64), casting="same_kind")


def _sum_rows(n: Node) -> Step:
    x, out = n.src(0).array, n.out.array
    return lambda: np.copyto(out, x.sum(axis=-1, keepdims=True, dtype=np.float64), casting="same_kind")


def _mean(n: Node) -> Step:
    x, out = n.src(0).array, n.out.array
    return lambda: np.copyto(out, x.mean(axis=-1, keepdims=True, dtype=np.float64), casting="same_kind")


def _cumsum(n: Node) -> Step:
    x, out = n.src(0).array, n.out.array
    return lambda: np.copyto(out, np.cumsum(x, axis=-1, dtype=np.float64), casting="same_kind")


def _argmax(n: Node) -> Step:
    """The first of equal maxima."""
    x, out = n.src(0).array[0, 0], n.out.array[0, 0, 0]
    return lambda: np.copyto(out, x.argmax(axis=-1), casting="same_kind")


BINDERS: dict[Op, Binder] = {
    Op.SUM: _sum,
    Op.SUM_ROWS: _sum_rows,
    Op.MEAN: _mean,
    Op.CUMSUM: _cumsum,
    Op.ARGMAX: _argmax,
}
