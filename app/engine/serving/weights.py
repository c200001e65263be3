"""Probabilities as integers: weight = exp(-distance) in units of 2^-40, so that sums are exact in any order.

A *distance* is how far a logit lies below the largest one, in nats; infinity is "out". Every step here is exact or
rounds once to float32, as the native kernel's do, so both give the same bits on any machine. A token of less than 2^-40
of the best one's probability weighs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Distances = NDArray[np.float32]

#: What the best token weighs.
ONE = 1 << 40

_FAR = np.float32(43.0)  # nats; weights are zero from here on
_LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HIGH = np.float32(float.fromhex("0x1.62e4p-1"))  # few enough bits for exact products with small integers
_LN2_LOW = np.float32(float.fromhex("0x1.7f7d1cp-20"))
_ROUND = np.float32(1.5 * 2**23)  # adding and taking it away rounds to an integer
_TAYLOR = [np.float32(1 / factorial) for factorial in (720, 120, 24, 6, 2, 1, 1)]
_MANTISSA = np.float32(2**24)
_SURPRISE = np.float32(2**16)


def weigh(distances: Distances) -> NDArray[np.uint64]:
    """Weights of distances that are zero or more: 2^-n * exp(f) with n whole and |f| at most ln(2) / 2."""
    x = np.minimum(distances, _FAR)
    n = (x * _LOG2_E + _ROUND) - _ROUND
    f = (n * _LN2_HIGH - x) + n * _LN2_LOW
    p = np.full_like(x, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        p = p * f + coefficient
    mantissa = (p * _MANTISSA).astype(np.uint64)
    return np.asarray((mantissa << np.uint64(16)) >> n.astype(np.uint64))


def scaled(distances: Distances, scale: float) -> Distances:
    """Distances at a temperature of 1 / `scale`."""
    with np.errstate(over="ignore"):  # infinitely far is far enough
        return np.asarray(distances * np.float32(scale))


def total_surprise(distances: Distances) -> int:
    """Sum of weight * distance in units of 2^-40, both factors cut so that a whole vocabulary fits 64 bits."""
    near = (np.minimum(distances, _FAR) * _SURPRISE).astype(np.uint64)
    return int(((weigh(distances) >> np.uint64(16)) * near).sum())
