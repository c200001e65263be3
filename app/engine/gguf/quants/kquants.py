"""Types with blocks of 256 and scales that are quantized themselves: Q2_K to Q6_K, IQ4_XS.

`d` and `dmin` are float16; `e` counts the elements of a block.
"""

from __future__ import annotations

import numpy as np

from app.engine.ggml import GGMLType
from app.engine.gguf.quants.blocks import (
    Bytes,
    Decoder,
    Floats,
    fields,
    grouped,
    half,
    nibble_pairs,
    nibbles,
    words,
)
from app.engine.gguf.quants.simple import IQ4_VALUES

_QUARTERS = (0, 2, 4, 6)
_EIGHTHS = (0, 1, 2, 3, 4, 5, 6, 7)


def _two_bit_codes(packed: Bytes) -> Bytes:
    """64 bytes to codes [2, 4, 32]: bits 2j of 32 bytes are elements 32j to 32j + 31 of a half."""
    return fields(packed.reshape(*packed.shape[:-1], 2, 32), _QUARTERS, 3)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    """[0] 16 x (scale | min << 4), [16] 64 bytes of codes, [80] d, [82] dmin: d*scale*code - dmin*min."""
    scales = nibbles(blocks[..., :16])
    values = grouped(out, 16)
    values[...] = _two_bit_codes(blocks[..., 16:80]).reshape(values.shape)
    values *= (half(blocks, 80) * scales[..., :16])[..., None]
    values -= (half(blocks, 82) * scales[..., 16:])[..., None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    """[0] 32 bytes of high bits, [32] 64 bytes of codes, [96] 16 six-bit scales, [108] d: d*(scale - 32)*(n - 4).

    The low four bits of the scales are nibbles of bytes 0 to 7, the upper two are fields of bytes 8 to 11.
    """
    packed = blocks[..., 96:108]
    upper = fields(packed[..., 8:], _QUARTERS, 3).reshape(*blocks.shape[:-1], 16)
    scales = nibbles(packed[..., :8]) | upper << 4
    scales -= 32
    high = fields(blocks[..., :32], _EIGHTHS, 1)
    high <<= 2
    codes = _two_bit_codes(blocks[..., 32:96]).reshape(high.shape) + high
    codes -= 4
    values = grouped(out, 16)
    values[...] = codes.view(np.int8).reshape(values.shape)
    values *= (half(blocks, 108) * scales.view(np.int8))[..., None]


def k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes to 8 six-bit scales and 8 six-bit mins.

    Bytes 0 to 3 hold the first four scales, 4 to 7 the first four mins, 8 to 11 the low nibbles of the other scales
    and mins, whose upper two bits are the top bits of bytes 0 to 7.
    """
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=-1)
    mins = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=-1)
    return scales, mins


def _scale_and_shift(blocks: Bytes, values: Floats) -> None:
    """The formula of Q4_K and Q5_K: d*scale*n - dmin*min, on codes [8, 32]."""
    scales, mins = k_scales(blocks[..., 4:16])
    values *= (half(blocks, 0) * scales)[..., None]
    values -= (half(blocks, 2) * mins)[..., None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] dmin, [4] 12 bytes of scales, [16] 4 x 32 bytes: low nibbles a sub-block, high ones the next."""
    values = grouped(out, 8)
    packed = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    np.bitwise_and(packed, 15, out=values[..., 0::2, :], casting="unsafe")
    np.right_shift(packed, 4, out=values[..., 1::2, :], casting="unsafe")
    _scale_and_shift(blocks, values)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    """As Q4_K with [16] 32 bytes whose bit b is the fifth bit of sub-block b, and the nibbles at [48]."""
    packed = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    fifth = fields(blocks[..., 16:48], _EIGHTHS, 1)
    fifth <<= 4
    fifth[..., 0::2, :] |= packed & 15
    fifth[..., 1::2, :] |= packed >> 4
    values = grouped(out, 8)
    values[...] = fifth
    _scale_and_shift(blocks, values)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """[0] 2 x 64 bytes of low nibbles, [128] 2 x 32 bytes of high bits, [192] 16 x int8 scales, [208] d.

    Of a half of 128 elements, the first 64 are low nibbles, the others high ones: d*scale*(n - 32).
    """
    low = nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64))
    high = fields(blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32), _QUARTERS, 3)
    high <<= 4
    codes = low.reshape(high.shape)
    codes |= high
    codes -= 32
    values = grouped(out, 16)
    values[...] = codes.view(np.int8).reshape(values.shape)
    values *= (half(blocks, 208) * blocks[..., 192:208].view(np.int8))[..., None]


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] upper scale bits, [4] lower scale nibbles, [8] 8 x 16 bytes: d*(scale - 32)*codebook[n]."""
    upper = fields(words(blocks, 2, 1, "<u2"), (0, 2, 4, 6, 8, 10, 12, 14), 3)[..., 0].astype(np.uint8)
    scales = nibble_pairs(blocks[..., 4:8]) | upper << 4
    scales -= 32
    values = grouped(out, 8)
    values[...] = IQ4_VALUES[nibbles(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16))]
    values *= (half(blocks, 0) * scales.view(np.int8))[..., None]


DECODERS: dict[GGMLType, Decoder] = {
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_XS: _iq4_xs,
}
