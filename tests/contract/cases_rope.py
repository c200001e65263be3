"""Cases of rotation."""

from __future__ import annotations

import math

import numpy as np

from app.engine.ggml import Op, RopeMode
from tests.contract.cases import F16, F32, I32, CaseBuilder, Values, op_case


def rotated(
    x: Values,
    positions: Values,
    mode: RopeMode,
    n_dims: int,
    *,
    base: float,
    scale: float = 1.0,
    extension: float = 0.0,
    magnitude: float = 1.0,
    n_ctx: int = 0,
    factors: Values | None = None,
    sections: tuple[int, int, int, int] = (0, 0, 0, 0),
    first: int = 0,
) -> Values:
    """One pair at a time; x is [b, tokens, heads, head], positions [runs, tokens]. beta_fast is 32, beta_slow 1."""
    out = x.copy()
    pairs = n_dims if mode is RopeMode.VISION else n_dims // 2
    for t, i in np.ndindex(x.shape[1], pairs):
        exponent, run = i, 0
        if mode in (RopeMode.MROPE, RopeMode.VISION, RopeMode.IMROPE):
            sector = i % sum(sections)
            run, start = section_of(sector, sections)
            if mode is RopeMode.VISION:
                exponent = sector - start
            if mode is RopeMode.IMROPE:
                by_third = {1: (1, sections[1]), 2: (2, sections[2]), 0: (0, sections[0])}[sector % 3]
                run = by_third[0] if sector < 3 * by_third[1] else 3
        raw = positions[run, t] * base ** (-2 * exponent / n_dims) / (1 if factors is None else factors[i])
        angle, size = scale * raw, magnitude
        if extension:

            def corrected(turns: float) -> float:
                return n_dims * math.log(n_ctx / (2 * math.pi * turns)) / (2 * math.log(base))

            low, high = max(0, math.floor(corrected(32))), min(n_dims - 1, math.ceil(corrected(1)))
            ramp = 1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            angle = angle * (1 - ramp * extension) + raw * ramp * extension
            size = magnitude * (1 + 0.1 * math.log(1 / scale))
        a, b = (first + 2 * i, first + 2 * i + 1) if mode is RopeMode.NORMAL else (first + i, first + i + pairs)
        cos, sin = math.cos(angle) * size, math.sin(angle) * size
        out[:, t, :, a] = x[:, t, :, a] * cos - x[:, t, :, b] * sin
        out[:, t, :, b] = x[:, t, :, a] * sin + x[:, t, :, b] * cos
    return out


def section_of(sector: int, sections: tuple[int, ...]) -> tuple[int, int]:
    """Which section a sector lies in, and where that section starts."""
    start = 0
    for number, length in enumerate(sections[:3]):
        if sector < start + length:
            return number, start
        start += length
    return 3, start


def rope_params(
    mode: RopeMode,
    n_dims: int,
    base: float,
    scale: float = 1.0,
    extension: float = 0.0,
    magnitude: float = 1.0,
    n_ctx: int = 0,
    sections: tuple[int, ...] = (0, 0, 0, 0),
    first: int = 0,
) -> tuple[int | float, ...]:
    return (0, n_dims, mode, 0, n_ctx, base, scale, extension, magnitude, 32.0, 1.0, *sections, first)


POSITIONS = np.array([0, 1, 7, 300, 5000])


@op_case(
    "rope",
    *(
        (mode, n_dims, first)
        for mode in (RopeMode.NORMAL, RopeMode.NEOX)
        for n_dims, first in ((16, 0), (8, 0), (8, 4))
    ),
)
def rope(c: CaseBuilder, mode: RopeMode, n_dims: int, first: int) -> None:
    """All channels, some, and some in the middle."""
    x, positions = c.random(F32, 16, 3, 5), c.leaf(I32, POSITIONS)
    out = c.node(Op.ROPE, F32, x.ne, (x, positions, None), rope_params(mode, n_dims, 10000.0, first=first))
    c.expect(out, rotated(c.values(x), POSITIONS[None], mode, n_dims, base=10000.0, first=first), "product")


@op_case("rope-factors")
def rope_factors(c: CaseBuilder) -> None:
    """Llama 3's frequency factors; there may be more than are needed."""
    x, positions = c.random(F32, 16, 2, 5), c.leaf(I32, POSITIONS)
    factors = c.leaf(F32, c.rng.uniform(1, 8, 10))
    out = c.node(Op.ROPE, F32, x.ne, (x, positions, factors), rope_params(RopeMode.NORMAL, 16, 500000.0))
    values = c.values(factors)[0, 0, 0]
    c.expect(out, rotated(c.values(x), POSITIONS[None], RopeMode.NORMAL, 16, base=500000.0, factors=values), "product")


@op_case("rope-scaled", ("linear", 0.0, 64), ("yarn", 1.0, 64), ("yarn", 1.0, 8192), ("half-yarn", 0.5, 8192))
def rope_scaled(c: CaseBuilder, _: str, extension: float, n_ctx: int) -> None:
    x, positions = c.random(F32, 32, 2, 5), c.leaf(I32, POSITIONS)
    params = rope_params(RopeMode.NEOX, 32, 10000.0, 0.125, extension, 0.9, n_ctx)
    out = c.node(Op.ROPE, F32, x.ne, (x, positions), params)
    want = rotated(
        c.values(x),
        POSITIONS[None],
        RopeMode.NEOX,
        32,
        base=10000.0,
        scale=0.125,
        extension=extension,
        magnitude=float(np.float32(0.9)),
        n_ctx=n_ctx,
    )
    c.expect(out, want, "product")


@op_case("rope-moving-positions")
def rope_moving_positions(c: CaseBuilder) -> None:
    """Positions that the program itself overwrites between two rotations."""
    x, positions, later = c.random(F32, 8, 2, 2), c.leaf(I32, np.array([3, 4])), c.leaf(I32, np.array([90, 7]))
    params = rope_params(RopeMode.NEOX, 8, 10000.0)
    first = c.node(Op.ROPE, F32, x.ne, (x, positions), params)
    c.node(Op.CPY, I32, (2,), (later, positions), alias=positions)
    second = c.node(Op.ROPE, F32, x.ne, (x, positions), params)
    for out, where in ((first, [3, 4]), (second, [90, 7])):
        c.expect(out, rotated(c.values(x), np.array([where]), RopeMode.NEOX, 8, base=10000.0), "product")


@op_case("rope-sections", (RopeMode.MROPE, 24), (RopeMode.IMROPE, 24), (RopeMode.IMROPE, 16), (RopeMode.VISION, 12))
def rope_sections(c: CaseBuilder, mode: RopeMode, n_dims: int) -> None:
    """Four runs of positions, one for each section of the pairs."""
    sections = (4, 3, 3, 2) if mode is not RopeMode.VISION else (6, 6, 0, 0)
    runs = c.rng.integers(0, 50, (4, 5))
    x, positions = c.random(F32, 24, 2, 5), c.leaf(I32, runs.reshape(-1))
    out = c.node(Op.ROPE, F32, x.ne, (x, positions), rope_params(mode, n_dims, 10000.0, sections=sections))
    c.expect(out, rotated(c.values(x), runs, mode, n_dims, base=10000.0, sections=sections), "product")


@op_case("rope-in-place")
def rope_in_place(c: CaseBuilder) -> None:
    """A shift of cached keys: part of a cache row, in place; negative positions turn back."""
    cache, positions = c.random(F32, 24, 6), c.leaf(I32, np.array([-3, 0, -1000, 2]))
    part = c.view(cache, (8, 2, 4), (4, 32, 96, 384), 96 + 16)
    want = rotated(c.values(part), np.array([[-3, 0, -1000, 2]]), RopeMode.NEOX, 8, base=10000.0)
    c.expect(
        c.node(Op.ROPE, F32, part.ne, (part, positions), rope_params(RopeMode.NEOX, 8, 10000.0), alias=part),
        want,
        "product",
    )


@op_case("rope-f16-streams")
def rope_f16_streams(c: CaseBuilder) -> None:
    """Half floats, and a fourth dimension that repeats the positions."""
    x, positions = c.random(F16, 8, 2, 3, 2), c.leaf(I32, np.array([4, 9, 2]))
    out = c.node(Op.ROPE, F16, x.ne, (x, positions), rope_params(RopeMode.NORMAL, 8, 10000.0))
    c.expect(out, rotated(c.values(x), np.array([[4, 9, 2]]), RopeMode.NORMAL, 8, base=10000.0), "f16")


@op_case("rope-strided")
def rope_strided(c: CaseBuilder) -> None:
    """Queries inside a fused projection [q | gate]."""
    fused, positions = c.random(F32, 16, 3, 2), c.leaf(I32, np.array([11, 12]))
    q = c.view(fused, (8, 3, 2), fused.nb)
    out = c.node(Op.ROPE, F32, (8, 3, 2), (q, positions), rope_params(RopeMode.NEOX, 8, 10000.0))
    c.expect(out, rotated(c.values(q), np.array([[11, 12]]), RopeMode.NEOX, 8, base=10000.0), "product")
