"""Ranges, diagonals and triangles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.ggml import Op


def _arange(n: Node) -> Step:
    start, step = np.float32(n.param_f32(0)), np.float32(n.param_f32(2))
    values = start + np.arange(n.out.ne[0], dtype=np.float32) * step
    return lambda: np.copyto(n.out.array, values)


def _diag(n: Node) -> Step:
    x, out = n.src(0).array, n.out.array
    diagonal = np.arange(n.out.ne[0])

    def step() -> None:
        out.fill(0)
        out[..., diagonal, diagonal] = x[..., 0, :]

    return step


#: Which elements of a row i1 at column i0 a triangle keeps, by its number.
TRIANGLES: tuple[Callable[[Any, Any], Any], ...] = (np.greater_equal, np.greater, np.less_equal, np.less)


def _tri(n: Node) -> Step:
    x, out = n.src(0).array, n.out.array
    columns, rows = np.arange(n.out.ne[0]), np.arange(n.out.ne[1])[:, None]
    keep = TRIANGLES[n.param(0)](columns, rows)
    return lambda: np.copyto(out, np.where(keep, x, np.float32(0)))


def _solve_tri(n: Node) -> Step:
    """Forward substitution of A X = B with A lower triangular, in float64; what is above its diagonal is not read."""
    a, b, out = n.src(0).array, n.src(1).array, n.out.array

    def step() -> None:
        x = b.astype(np.float64)
        for i in range(a.shape[-1]):
            known = np.matmul(a[..., i : i + 1, :i].astype(np.float64), x[..., :i, :])
            x[..., i, :] = (x[..., i, :] - known[..., 0, :]) / a[..., i, i, None]
        np.copyto(out, x, casting="same_kind")

    return step


BINDERS: dict[Op, Binder] = {Op.ARANGE: _arange, Op.DIAG: _diag, Op.TRI: _tri, Op.SOLVE_TRI: _solve_tri}
