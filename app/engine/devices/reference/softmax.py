"""SOFT_MAX, and the slopes of ALiBi that attention shares with it."""

from __future__ import annotations

import math

import numpy as np

from app.engine.devices.reference.elementwise import broadcast_views
from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats
from app.engine.ggml import Op


def alibi_slopes(heads: int, max_bias: float) -> Floats:
    """What each head multiplies its mask by; all ones when `max_bias` is 0."""
    if max_bias == 0:
        return np.ones(heads, np.float32)
    power = 2 ** math.floor(math.log2(heads))
    m0, m1 = 2 ** (-max_bias / power), 2 ** (-max_bias / 2 / power)
    slopes = [m0 ** (h + 1) if h < power else m1 ** (2 * (h - power) + 1) for h in range(heads)]
    return np.array(slopes, np.float32)


def softmax_in_place(scores: Floats, sinks: Floats | None = None) -> None:
    """Softmax over the last axis. Scores of minus infinity get exactly 0; a row of nothing else becomes all 0.

    `sinks` [..., 1] takes part in the maximum and the sum, but gets no column of its own.
    """
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    top = np.where(np.isneginf(top), np.float32(0), top)
    np.exp(np.subtract(scores, top, out=scores), out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - top)
    np.divide(scores, np.where(total == 0, np.float32(1), total), out=scores)


def _soft_max(n: Node) -> Step:
    """softmax(scale * x + slope * mask) by rows; what the mask hides is selected away, whatever it holds."""
    x, mask, sinks, out = n.src(0).array, n.optional(1), n.optional(2), n.out.array
    scale, heads = np.float32(n.param_f32(0)), n.out.ne[2]
    slopes = alibi_slopes(heads, n.param_f32(1)).reshape(1, heads, 1, 1)
    sink_column = None if sinks is None else sinks.array.reshape(1, heads, 1, 1)

    def step() -> None:
        z = x * scale
        if mask is not None:
            rows = mask.load()[:, :, : x.shape[2]]
            see, bias = broadcast_views(z, rows)
            folded_slopes = see(np.broadcast_to(slopes, z.shape))
            np.add(see(z), folded_slopes * bias, out=see(z))
            np.copyto(see(z), np.float32(-np.inf), where=np.isneginf(bias))
        softmax_in_place(z, sink_column)
        np.copyto(out, z)

    return step


BINDERS: dict[Op, Binder] = {Op.SOFT_MAX: _soft_max}
