"""Types that look groups of 4 or 8 elements up in a codebook: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M.

The codebooks are tables of the `gguf` package; it is imported when the first such tensor is read.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import GGMLType
from app.engine.gguf.quants.blocks import (
    Bytes,
    Decoder,
    Floats,
    Ints,
    fields,
    grouped,
    half,
    halves_of,
    nibble_pairs,
    words,
)

GridName = Literal["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]

_SHIFTS_OF_7 = (0, 7, 14, 21)
_SHIFTS_OF_3 = (0, 3, 6, 9)
_DELTA = np.float32(0.125)


@cache
def grid(name: GridName) -> NDArray[np.int8]:
    """The codebook of a type, int8 [entries, 4 or 8]. IQ1_M uses that of IQ1_S."""
    from gguf import quants

    table = getattr(quants, name)
    table.init_grid()
    values: NDArray[np.int8] = table.grid[0, 0].astype(np.int8)
    values.flags.writeable = False
    return values


def _sign_rows() -> NDArray[np.int8]:
    """int8 [256, 8]: -1 where bit i of the index is set, else 1."""
    return 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)


_SIGNS = _sign_rows()
#: The same for indices of seven bits: the eighth makes the number of set bits even.
_SIGNS_7 = _SIGNS[[i | (i.bit_count() & 1) << 7 for i in range(128)]]


def _signed(table: NDArray[np.int8], index: Ints, signs: NDArray[np.int8]) -> NDArray[np.int8]:
    """Codebook rows [..., 4 or 8] times their signs [..., 8], as [..., 8]."""
    values = table[index].reshape(signs.shape)
    values *= signs
    return values


def _iq2_xxs(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 8 x (4 index bytes, 4 x 7 sign bits, 4 scale bits): d*(0.5 + s)/4 * entry."""
    pairs = words(blocks, 2, 16, "<u4").reshape(*blocks.shape[:-1], 8, 2)
    index = blocks[..., 2:66].reshape(*blocks.shape[:-1], 8, 8)[..., :4]
    signs = _SIGNS_7[fields(pairs[..., 1:], _SHIFTS_OF_7, 127)[..., 0]]
    scale = half(blocks, 0) * (np.float32(0.5) + (pairs[..., 1] >> np.uint32(28)).astype(np.float32)) * np.float32(0.25)
    values = grouped(out, 8)
    values[...] = _signed(grid("IQ2_XXS"), index, signs).reshape(values.shape)
    values *= scale[..., None]


def _scale_per_16(blocks: Bytes, start: int) -> Floats:
    """d*(0.5 + s)/4 for 16 groups of 16 elements; s are the nibbles of 8 bytes."""
    scales = nibble_pairs(blocks[..., start : start + 8]).astype(np.float32)
    scaled: Floats = half(blocks, 0) * (np.float32(0.5) + scales) * np.float32(0.25)
    return scaled


def _iq2_xs(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 32 x (9 index bits, 7 sign bits), [66] 16 scale nibbles."""
    codes = words(blocks, 2, 32, "<u2")
    values = grouped(out, 16)
    entries = _signed(grid("IQ2_XS"), codes & np.uint16(511), _SIGNS_7[codes >> np.uint16(9)])
    values[...] = entries.reshape(values.shape)
    values *= _scale_per_16(blocks, 66)[..., None]


def _iq2_s(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 32 low index bytes, [34] 32 sign bytes, [66] 32 x 2 high index bits, [74] 16 scale nibbles."""
    high = fields(blocks[..., 66:74, None], (0, 2, 4, 6), 3).reshape(*blocks.shape[:-1], 32)
    index = blocks[..., 2:34] | high.astype(np.uint16) << np.uint16(8)
    values = grouped(out, 16)
    values[...] = _signed(grid("IQ2_S"), index, _SIGNS[blocks[..., 34:66]]).reshape(values.shape)
    values *= _scale_per_16(blocks, 74)[..., None]


def _iq3_xxs(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 64 index bytes, [66] 8 x (4 x 7 sign bits, 4 scale bits): d*(0.5 + s)/2 * entry."""
    packed = words(blocks, 66, 8, "<u4")
    signs = _SIGNS_7[fields(packed[..., None], _SHIFTS_OF_7, 127)[..., 0]]
    scale = half(blocks, 0) * (np.float32(0.5) + (packed >> np.uint32(28)).astype(np.float32)) * np.float32(0.5)
    values = grouped(out, 8)
    values[...] = _signed(grid("IQ3_XXS"), blocks[..., 2:66], signs).reshape(values.shape)
    values *= scale[..., None]


def _iq3_s(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 64 low index bytes, [66] 64 high index bits, [74] 32 sign bytes, [106] 8 scale nibbles: d*(1 + 2s)."""
    high = np.unpackbits(blocks[..., 66:74], axis=-1, bitorder="little")
    index = blocks[..., 2:66] | high.astype(np.uint16) << np.uint16(8)
    scale = half(blocks, 0) * (1 + 2 * nibble_pairs(blocks[..., 106:110])).astype(np.float32)
    values = grouped(out, 8)
    values[...] = _signed(grid("IQ3_S"), index, _SIGNS[blocks[..., 74:106]]).reshape(values.shape)
    values *= scale[..., None]


def _iq1_s(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 32 low index bytes, [34] 8 x (4 x 3 high index bits, 3 scale bits, delta sign).

    d*(2s + 1)*(entry + delta), delta 1/8, negative when the top bit is set.
    """
    codes = words(blocks, 34, 8, "<u2")
    high = fields(codes[..., None], _SHIFTS_OF_3, 7).reshape(*blocks.shape[:-1], 32)
    index = blocks[..., 2:34] | high << np.uint16(8)
    scale = half(blocks, 0) * (2 * (codes >> np.uint16(12) & np.uint16(7)) + 1).astype(np.float32)
    delta = np.where(codes & np.uint16(0x8000), -_DELTA, _DELTA)
    values = grouped(out, 8)
    values[...] = grid("IQ1_S")[index].reshape(values.shape)
    values += delta[..., None]
    values *= scale[..., None]


def _iq1_m(blocks: Bytes, out: Floats) -> None:
    """[0] 32 low index bytes, [32] 32 x (3 high index bits, delta sign), [48] 4 x (4 x 3 scale bits, 4 bits of d)."""
    packed = words(blocks, 48, 4, "<u2")
    places = np.array([12, 8, 4, 0], np.uint16)
    d_bits = np.bitwise_or.reduce((packed & np.uint16(0xF000)) >> places, axis=-1)
    scale = fields(packed[..., None], _SHIFTS_OF_3, 7).reshape(*blocks.shape[:-1], 16)
    scaled = halves_of(d_bits)[..., None] * (2 * scale + 1).astype(np.float32)
    high = nibble_pairs(blocks[..., 32:48])
    index = blocks[..., :32] | (high & 7).astype(np.uint16) << np.uint16(8)
    delta = np.where(high & 8, -_DELTA, _DELTA)
    entries = grouped(out, 32)
    entries[...] = grid("IQ1_S")[index]
    entries += delta[..., None]
    values = grouped(out, 16)
    values *= scaled[..., None]


DECODERS: dict[GGMLType, Decoder] = {
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ2_XS: _iq2_xs,
    GGMLType.IQ2_S: _iq2_s,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
    GGMLType.IQ1_S: _iq1_s,
    GGMLType.IQ1_M: _iq1_m,
}
