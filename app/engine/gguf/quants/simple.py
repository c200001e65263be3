"""Types with one scale per block of 32 to 128: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q1_0, Q2_0, IQ4_NL, MXFP4, NVFP4.

Byte layouts stand in front of each decoder; `d` and `m` are float16.
"""

from __future__ import annotations

import numpy as np

from app.engine.ggml import GGMLType
from app.engine.gguf.quants.blocks import Bytes, Decoder, Floats, bits, fields, grouped, half, nibbles

#: Codebook of IQ4_NL and IQ4_XS.
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.int8,
)
#: Twice the values of a 4-bit float with two exponent bits (E2M1); scales are halved to make up for it.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
#: 2^(e - 128): half of what an 8-bit exponent with bias 127 stands for.
_E8M0_HALVED: Floats = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _ue4m3_halved() -> Floats:
    """Half the value of an unsigned 8-bit float with four exponent bits. Bit 7 is ignored; 0x7f stands for 0."""
    code = np.arange(256) & 127
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, np.ldexp(1 + mantissa / 8, exponent - 7))
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


_UE4M3_HALVED = _ue4m3_halved()


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 32 x int8: d * q."""
    out[...] = blocks[..., 2:].view(np.int8)
    out *= half(blocks, 0)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 16 bytes, low nibbles first: d * (n - 8)."""
    codes = nibbles(blocks[..., 2:])
    codes -= 8
    out[...] = codes.view(np.int8)
    out *= half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] m, [4] 16 bytes: d * n + m."""
    out[...] = nibbles(blocks[..., 4:])
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _with_fifth_bit(codes: Bytes, high: Bytes) -> Bytes:
    fifth = bits(high)
    fifth <<= 4
    codes |= fifth
    return codes


def _q5_0(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 32 high bits, [6] 16 bytes: d * (n - 16)."""
    codes = _with_fifth_bit(nibbles(blocks[..., 6:]), blocks[..., 2:6])
    codes -= 16
    out[...] = codes.view(np.int8)
    out *= half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] m, [4] 32 high bits, [8] 16 bytes: d * n + m."""
    out[...] = _with_fifth_bit(nibbles(blocks[..., 8:]), blocks[..., 4:8])
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q1_0(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 128 bits: d or -d."""
    codes = bits(blocks[..., 2:])
    codes <<= 1
    codes -= 1
    out[...] = codes.view(np.int8)
    out *= half(blocks, 0)


def _q2_0(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 16 bytes of four codes each, lowest first: d * (code - 1)."""
    codes = fields(blocks[..., 2:], (0, 2, 4, 6), 3).swapaxes(-1, -2)
    grouped(out, 16)[...] = (codes - np.uint8(1)).view(np.int8)
    out *= half(blocks, 0)


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    """[0] d, [2] 16 bytes as Q4_0: d * codebook[n]."""
    out[...] = IQ4_VALUES[nibbles(blocks[..., 2:])]
    out *= half(blocks, 0)


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    """[0] exponent e, [1] 16 bytes as Q4_0: 2^(e - 127) * E2M1[n]."""
    out[...] = E2M1_DOUBLED[nibbles(blocks[..., 1:])]
    out *= _E8M0_HALVED[blocks[..., 0:1]]


def _nvfp4(blocks: Bytes, out: Floats) -> None:
    """[0] 4 scales, [4] 4 x 8 bytes, per sub-block of 16 low nibbles first: UE4M3[s] * E2M1[n]."""
    packed = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    values = grouped(out, 4)
    values[...] = E2M1_DOUBLED[nibbles(packed)]
    values *= _UE4M3_HALVED[blocks[..., :4, None]]


DECODERS: dict[GGMLType, Decoder] = {
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q1_0: _q1_0,
    GGMLType.Q2_0: _q2_0,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.NVFP4: _nvfp4,
}
