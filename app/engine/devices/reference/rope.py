"""ROPE: rotation of channel pairs by angles that grow with the position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats, Operand
from app.engine.ggml import Op, RopeMode

Doubles = NDArray[np.float64]

#: Which of the four runs of positions (time, height, width, other) a pair turns by.
_TIME, _HEIGHT, _WIDTH, _OTHER = range(4)


@dataclass(frozen=True, slots=True)
class Rotation:
    """All that does not depend on positions. Angles are float64 until their sine and cosine are taken.

    `frequencies` [pairs]: angle per position. `runs` [pairs]: whose position.
    `mix` [pairs]: how much of the extrapolated angle YaRN keeps.
    """

    runs: NDArray[np.intp]
    frequencies: Doubles
    scale: float
    mix: Doubles
    magnitude: float

    def angles(self, positions: Doubles, factors: Doubles | None) -> Doubles:
        """Angles [tokens, pairs] for positions [runs, tokens]."""
        raw = positions[self.runs].T * self.frequencies
        if factors is not None:
            raw = raw / factors[: len(self.frequencies)]
        return raw * self.scale * (1 - self.mix) + raw * self.mix


def _rotation(n: Node) -> Rotation:
    n_dims, mode, n_ctx_orig = n.param(1), RopeMode(n.param(2)), n.param(4)
    base, scale, extension, magnitude, beta_fast, beta_slow = (n.param_f32(i) for i in range(5, 11))
    sections = [n.param(i) for i in range(11, 15)]
    pairs = n_dims if mode is RopeMode.VISION else n_dims // 2
    runs, exponents = _sections(mode, pairs, sections)
    mix = np.zeros(pairs)
    if extension != 0:

        def corrected(rotations: float) -> float:
            return n_dims * math.log(n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(corrected(beta_fast)))
        high = min(n_dims - 1, math.ceil(corrected(beta_slow)))
        ramp = (np.arange(pairs) - low) / max(0.001, high - low)
        mix = (1 - np.clip(ramp, 0, 1)) * extension
        magnitude *= 1 + 0.1 * math.log(1 / scale)
    frequencies = base ** (-2.0 * exponents / n_dims)
    return Rotation(runs, frequencies, scale, mix, magnitude)


def _sections(mode: RopeMode, pairs: int, sections: list[int]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Run of positions and exponent of every pair."""
    index = np.arange(pairs)
    if mode in (RopeMode.NORMAL, RopeMode.NEOX):
        return np.zeros(pairs, np.intp), index
    sector = index % sum(sections)
    if mode is RopeMode.IMROPE:
        _, height, width, _ = sections
        conditions = [
            (sector % 3 == 1) & (sector < 3 * height),
            (sector % 3 == 2) & (sector < 3 * width),
            (sector % 3 == 0) & (sector < 3 * sections[0]),
        ]
        return np.select(conditions, [_HEIGHT, _WIDTH, _TIME], _OTHER), index
    starts = np.cumsum([0, *sections[:3]])
    runs = np.searchsorted(starts, sector, side="right") - 1
    if mode is RopeMode.VISION:  # every section counts its own exponents
        return runs, sector - starts[runs]
    return runs, index


def _members(mode: RopeMode, first: int, n_dims: int) -> tuple[slice, slice]:
    """Channels of the first and of the second member of every pair."""
    if mode is RopeMode.NORMAL:
        return slice(first, first + n_dims, 2), slice(first + 1, first + n_dims, 2)
    half = n_dims if mode is RopeMode.VISION else n_dims // 2
    return slice(first, first + half), slice(first + half, first + 2 * half)


def _rope(n: Node) -> Step:
    """(x, y) -> (x cos - y sin, x sin + y cos), times the magnitude; other channels pass through."""
    source, positions, factors, out = n.src(0), n.src(1), n.optional(2), n.out
    mode = RopeMode(n.param(2))
    rotation = _rotation(n)
    left, right = _members(mode, n.param(15), n.param(1))
    unturned = [slice(0, left.start), slice(right.stop, None)]
    tokens = n.out.ne[2]

    def turns() -> tuple[Floats, Floats]:
        where = positions.array.reshape(-1, tokens).astype(np.float64)
        angles = rotation.angles(where, None if factors is None else _row(factors))
        shape = (tokens, 1, -1)
        cosines = (np.cos(angles) * rotation.magnitude).astype(np.float32).reshape(shape)
        return cosines, (np.sin(angles) * rotation.magnitude).astype(np.float32).reshape(shape)

    table = n.shared("rope", (positions, factors), turns, out.tensor.params, tokens)

    def step() -> None:
        cosines, sines = table()
        x = source.load()
        a, b = x[..., left], x[..., right]
        turned_a, turned_b = a * cosines - b * sines, a * sines + b * cosines
        for channels in unturned:
            out.array[..., channels] = source.array[..., channels]
        out.array[..., left] = turned_a
        out.array[..., right] = turned_b

    return step


def _row(operand: Operand) -> Doubles:
    return operand.array.reshape(-1).astype(np.float64)


BINDERS: dict[Op, Binder] = {Op.ROPE: _rope}
