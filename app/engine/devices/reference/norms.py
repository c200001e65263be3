"""Normalisation of rows; learned weights and biases are ops of their own. Sums are float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats
from app.engine.ggml import Op


def _squares(x: Floats) -> NDArray[np.float64]:
    """Sum of squares of each row, [..., 1], float64."""
    total: NDArray[np.float64] = np.square(x).sum(axis=-1, keepdims=True, dtype=np.float64)
    return total


def _rms_norm(n: Node) -> Step:
    """x / sqrt(mean(x^2) + eps)."""
    x, out, eps, count = n.src(0).array, n.out.array, n.param_f32(0), n.out.ne[0]

    def step() -> None:
        factor = 1 / np.sqrt(_squares(x) / count + eps)
        np.multiply(x, factor.astype(np.float32), out=out)

    return step


def _norm(n: Node) -> Step:
    """(x - mean) / sqrt(variance + eps)."""
    x, out, eps, count = n.src(0).array, n.out.array, n.param_f32(0), n.out.ne[0]

    def step() -> None:
        centred = x - x.mean(axis=-1, keepdims=True, dtype=np.float64).astype(np.float32)
        factor = 1 / np.sqrt(_squares(centred) / count + eps)
        np.multiply(centred, factor.astype(np.float32), out=out)

    return step


def _l2_norm(n: Node) -> Step:
    """x / max(|x|, eps)."""
    x, out, eps = n.src(0).array, n.out.array, n.param_f32(0)

    def step() -> None:
        factor = 1 / np.maximum(np.sqrt(_squares(x)), eps)
        np.multiply(x, factor.astype(np.float32), out=out)

    return step


def _group_norm(n: Node) -> Step:
    """Normalises groups of the channels in dimension 2 together; the last group may be smaller."""
    x, out, groups, eps = n.src(0).array, n.out.array, n.param(0), n.param_f32(1)
    channels = n.out.ne[2]
    size = math.ceil(channels / groups)

    def step() -> None:
        for first in range(0, channels, size):
            part = x[:, first : first + size].astype(np.float64)
            centred = part - part.mean(axis=(1, 2, 3), keepdims=True)
            variance = np.square(centred).mean(axis=(1, 2, 3), keepdims=True)
            out[:, first : first + size] = centred / np.sqrt(variance + eps)

    return step


BINDERS: dict[Op, Binder] = {
    Op.RMS_NORM: _rms_norm,
    Op.NORM: _norm,
    Op.L2_NORM: _l2_norm,
    Op.GROUP_NORM: _group_norm,
}
