"""float32 to packed rows, for the types a KV cache may have; rounding as in ggml's reference encoders."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import GGMLType
from app.engine.gguf.quants.blocks import Bytes, Encoder, Floats
from app.engine.gguf.quants.simple import IQ4_VALUES

_TINY = np.float32(1e-15)
_ONE = np.float32(1)


def _put(out: Bytes, start: int, values: NDArray[np.generic]) -> None:
    """Store [rows, blocks, n] words at byte `start` of every block."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    out[..., start : start + raw.shape[-1]] = raw


def _to_half(values: Floats) -> NDArray[np.float16]:
    """To the nearest, ties to even; too large becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype("<f2")


def _inverse(d: Floats) -> Floats:
    """1/d, and 0 for 0."""
    return np.divide(_ONE, d, out=np.zeros_like(d), where=d != 0)


def _f32(values: Floats, out: Bytes) -> None:
    _put(out, 0, values.astype("<f4", copy=False))


def _f16(values: Floats, out: Bytes) -> None:
    _put(out, 0, _to_half(values))


def _bf16(values: Floats, out: Bytes) -> None:
    """The upper half, to the nearest, ties to even; NaN stays NaN and becomes quiet."""
    word = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (word + (np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    quiet = word >> np.uint32(16) | np.uint32(64)
    is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    _put(out, 0, np.where(is_nan, quiet, rounded).astype("<u2"))


def _round_away(values: Floats) -> Floats:
    """To the nearest integer, halves away from zero."""
    whole = np.trunc(values)
    away = np.abs(values - whole) >= np.float32(0.5)
    rounded: Floats = whole + np.copysign(away.astype(np.float32), values)
    return rounded


def _q8_0(values: Floats, out: Bytes) -> None:
    d = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
    _put(out, 0, _to_half(d))
    _put(out, 2, _round_away(values * _inverse(d)).astype(np.int8))


def _extreme(values: Floats) -> Floats:
    """The element of largest magnitude with its sign; the first of equals."""
    where = np.abs(values).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(values, where, axis=-1)


def _put_nibbles(out: Bytes, start: int, codes: Bytes) -> None:
    """First half of a block in the low nibbles, second half in the high ones."""
    out[..., start:] = codes[..., :16] & 15 | codes[..., 16:] << 4


def _codes_around(values: Floats, top: int) -> tuple[Floats, Bytes]:
    """Scale and codes 0 to `top` where (top + 1) / 2 stands for zero and 0 for the extreme element."""
    middle = np.float32((top + 1) // 2)
    d = _extreme(values) / -middle
    codes = (values * _inverse(d) + (middle + np.float32(0.5))).astype(np.uint8)
    return d, np.minimum(codes, np.uint8(top))


def _codes_above(values: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """Scale, minimum and codes 0 to `top` between the smallest and the largest element."""
    low = values.min(axis=-1, keepdims=True)
    d = (values.max(axis=-1, keepdims=True) - low) / np.float32(top)
    codes = ((values - low) * _inverse(d) + np.float32(0.5)).astype(np.uint8)
    return d, low, np.minimum(codes, np.uint8(top))


def _q4_0(values: Floats, out: Bytes) -> None:
    d, codes = _codes_around(values, 15)
    _put(out, 0, _to_half(d))
    _put_nibbles(out, 2, codes)


def _q4_1(values: Floats, out: Bytes) -> None:
    d, low, codes = _codes_above(values, 15)
    _put(out, 0, _to_half(d))
    _put(out, 2, _to_half(low))
    _put_nibbles(out, 4, codes)


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=-1, bitorder="little")


def _q5_0(values: Floats, out: Bytes) -> None:
    d, codes = _codes_around(values, 31)
    _put(out, 0, _to_half(d))
    _put(out, 2, _fifth_bits(codes))
    _put_nibbles(out, 6, codes)


def _q5_1(values: Floats, out: Bytes) -> None:
    d, low, codes = _codes_above(values, 31)
    _put(out, 0, _to_half(d))
    _put(out, 2, _to_half(low))
    _put(out, 4, _fifth_bits(codes))
    _put_nibbles(out, 8, codes)


def _nearest_iq4(values: Floats) -> Bytes:
    """Index of the nearest codebook entry; the upper one when two are equally near."""
    book = IQ4_VALUES.astype(np.float32)
    upper = np.clip(np.searchsorted(book, values, side="right"), 1, 15)
    take_lower = values - book[upper - 1] < book[upper] - values
    return (upper - take_lower).astype(np.uint8)


def _iq4_nl(values: Floats, out: Bytes) -> None:
    """Codes for the scale that maps the extreme element to the codebook's end, then the best scale for these codes."""
    extreme = _extreme(values)
    alive = np.abs(extreme) >= _TINY
    codes = np.where(alive, _nearest_iq4(values * _inverse(extreme / np.float32(IQ4_VALUES[0]))), np.uint8(0))
    book = IQ4_VALUES[codes].astype(np.float32)
    weighted = values * values * book
    sum_qx, sum_q2 = np.zeros_like(extreme), np.zeros_like(extreme)
    for j in range(values.shape[-1]):  # one after another: the order of a float sum is part of the result
        sum_qx += weighted[..., j : j + 1] * values[..., j : j + 1]
        sum_q2 += weighted[..., j : j + 1] * book[..., j : j + 1]
    d = np.divide(sum_qx, sum_q2, out=np.zeros_like(sum_qx), where=alive & (sum_q2 > 0))
    _put(out, 0, _to_half(d))
    _put_nibbles(out, 2, codes)


ENCODERS: dict[GGMLType, Encoder] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.IQ4_NL: _iq4_nl,
}
