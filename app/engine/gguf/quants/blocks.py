"""What the decoders share: halves, nibbles, bits and the packed scales of blocks.

All work on uint8 arrays [rows, blocks, bytes] and float32 arrays [rows, blocks, elements].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[Any]

#: Fills float32 [rows, blocks, elements] from uint8 [rows, blocks, bytes].
Decoder = Callable[[Bytes, Floats], None]
#: Fills uint8 [rows, blocks, bytes] from float32 [rows, blocks, elements].
Encoder = Callable[[Floats, Bytes], None]

_WIDE = np.dtype(np.complex128)  # any plain 16-byte element
_HALVES: Floats = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def words(blocks: Bytes, start: int, count: int, dtype: str) -> Ints:
    """`count` little-endian words of `dtype` from byte `start` of every block; a view, perhaps not aligned."""
    return blocks[..., start : start + count * np.dtype(dtype).itemsize].view(dtype)


def half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` as float32 [rows, blocks, 1]."""
    return words(blocks, start, 1, "<f2").astype(np.float32)


def halves_of(patterns: Ints) -> Floats:
    """float16 bit patterns (uint16, any shape) as float32. For many, a table is faster than numpy's conversion."""
    return np.take(_HALVES, patterns, mode="wrap")


def nibbles(packed: Bytes) -> Bytes:
    """n bytes to 2n values: all low nibbles, then all high ones."""
    n = packed.shape[-1]
    out = np.empty((*packed.shape[:-1], 2 * n), np.uint8)
    if n == _WIDE.itemsize:  # one move per block instead of one loop over it
        packed = np.ascontiguousarray(packed)
        wide = out.view(_WIDE)
        wide[..., 0:1] = (packed & 15).view(_WIDE)
        wide[..., 1:2] = (packed >> 4).view(_WIDE)
    else:
        np.bitwise_and(packed, 15, out=out[..., :n])
        np.right_shift(packed, 4, out=out[..., n:])
    return out


def bits(packed: Bytes) -> Bytes:
    """n bytes to 8n bits, lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def nibble_pairs(packed: Bytes) -> Bytes:
    """n bytes to 2n values: low and high nibble of each byte in turn."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0])
    np.right_shift(packed, 4, out=out[..., 1])
    return out.reshape(*packed.shape[:-1], -1)


def fields(packed: Ints, shifts: tuple[int, ...], mask: int) -> Ints:
    """[..., n] words to [..., len(shifts), n] fields of the words."""
    steps = np.array(shifts, packed.dtype)[:, None]
    values: Ints = (packed[..., None, :] >> steps) & packed.dtype.type(mask)
    return values


def grouped(values: Floats, n_groups: int) -> Floats:
    """[rows, blocks, n] seen as [rows, blocks, n_groups, n / n_groups]; a view."""
    return values.reshape(*values.shape[:-1], n_groups, -1)
