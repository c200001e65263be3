"""Types with values -1, 0 and 1: TQ1_0 (base 3) and TQ2_0 (two bits)."""

from __future__ import annotations

import numpy as np

from app.engine.ggml import GGMLType
from app.engine.gguf.quants.blocks import Bytes, Decoder, Floats, fields, half

_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def _trits(packed: Bytes, n_digits: int) -> Bytes:
    """[..., n] bytes to [..., n_digits * n] digits, all first digits first.

    A byte is the base-3 fraction of its digits times 256, rounded up: multiplying it by 3^k modulo 256 moves digit k
    to the front, and three times that, divided by 256, is the digit.
    """
    moved = packed[..., None, :] * _POWERS_OF_3[:n_digits]
    digits = (moved.astype(np.uint16) * np.uint16(3) >> 8).astype(np.uint8)
    return digits.reshape(*packed.shape[:-1], -1)


def _tq1_0(blocks: Bytes, out: Floats) -> None:
    """[0] 32 bytes and [32] 16 bytes of five digits, [48] 4 bytes of four digits, [52] d: d * (digit - 1)."""
    out[..., :160] = _trits(blocks[..., :32], 5)
    out[..., 160:240] = _trits(blocks[..., 32:48], 5)
    out[..., 240:] = _trits(blocks[..., 48:52], 4)
    out -= 1
    out *= half(blocks, 52)


def _tq2_0(blocks: Bytes, out: Floats) -> None:
    """[0] 2 x 32 bytes of four codes, [64] d: d * (code - 1)."""
    codes = fields(blocks[..., :64].reshape(*blocks.shape[:-1], 2, 32), (0, 2, 4, 6), 3)
    codes -= 1
    out[...] = codes.view(np.int8).reshape(out.shape)
    out *= half(blocks, 64)


DECODERS: dict[GGMLType, Decoder] = {GGMLType.TQ1_0: _tq1_0, GGMLType.TQ2_0: _tq2_0}
