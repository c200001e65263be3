"""Ops that copy, convert, tile, join and pad."""

from __future__ import annotations

import numpy as np

from app.engine.devices.reference.elementwise import broadcast_views
from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.ggml import Op


def _copy(n: Node) -> Step:
    """DUP, CONT and CPY: elements in logical order (dimension 0 fastest), converted to the result's type."""
    source, out = n.src(0), n.out
    if source.type == out.type:
        x = source.array
        if x.shape == out.array.shape:
            return lambda: np.copyto(out.array, x)
        return lambda: np.copyto(out.array, x.reshape(out.array.shape))
    shape = tuple(reversed(out.ne))
    return lambda: out.store(source.load().reshape(shape))


def _repeat(n: Node) -> Step:
    """Tiles: the result's index modulo the source's extent."""
    out = n.out.array
    see, small = broadcast_views(out, n.src(0).array)
    result = see(out)
    return lambda: np.copyto(result, small)


def _concat(n: Node) -> Step:
    a, b, axis = n.src(0).array, n.src(1).array, 3 - n.param(0)
    left, right = np.split(n.out.array, [a.shape[axis]], axis=axis)

    def step() -> None:
        np.copyto(left, a)
        np.copyto(right, b)

    return step


def _pad(n: Node) -> Step:
    """Zeros around the source, or the source again and again (circular)."""
    x, out = n.src(0).array, n.out.array
    widths = [(n.param(2 * dim), n.param(2 * dim + 1)) for dim in (3, 2, 1, 0)]
    if n.param(8):
        return lambda: np.copyto(out, np.pad(x, widths, mode="wrap"))
    inside = out[tuple(slice(before, before + extent) for (before, _), extent in zip(widths, x.shape, strict=True))]

    def step() -> None:
        out.fill(0)
        np.copyto(inside, x)

    return step


BINDERS: dict[Op, Binder] = {
    Op.DUP: _copy,
    Op.CONT: _copy,
    Op.CPY: _copy,
    Op.REPEAT: _repeat,
    Op.CONCAT: _concat,
    Op.PAD: _pad,
}
