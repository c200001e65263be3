"""Rows of a quantized matrix times one vector, block by block: sum of scale * (codes . x) + offset * sum(x).

Unpacking a weight to float32 takes several passes over it; for a single vector, as in decode, that is nearly all the
work. Here only the codes, small integers, are unpacked, and scales meet one number per block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.devices.reference.operand import Floats, View
from app.engine.devices.reference.workers import Workers
from app.engine.ggml import TRAITS, GGMLType
from app.engine.gguf.quants.blocks import halves_of, words
from app.engine.gguf.quants.kquants import k_scales

Bytes = NDArray[np.uint8]
_SIXTEEN_BYTES = np.dtype(np.complex128)


class Part(NamedTuple):
    """Codes [rows, groups, width] of small integers, and what each group of a row is scaled and shifted by."""

    codes: View
    scales: Floats
    offsets: Floats | None


class Split(NamedTuple):
    """How rows of a type fall into parts: element e of a row belongs to part (e // width) % n_parts."""

    n_parts: int
    width: int
    parts: Callable[[Bytes], tuple[Part, ...]]  # from blocks [rows, blocks, bytes]


def _packed(blocks: Bytes, start: int) -> Bytes:
    """The bytes of every block from `start` on, side by side; moved sixteen at a time."""
    return np.ascontiguousarray(blocks[..., start:].view(_SIXTEEN_BYTES)).view(np.uint8)


def _q8_0(blocks: Bytes) -> tuple[Part, ...]:
    return (Part(blocks[..., 2:].view(np.int8), halves_of(words(blocks, 0, 1, "<u2"))[..., 0], None),)


def _q4_0(blocks: Bytes) -> tuple[Part, ...]:
    scales, codes = halves_of(words(blocks, 0, 1, "<u2"))[..., 0], _packed(blocks, 2)
    offsets = scales * np.float32(-8)
    return Part(codes & 15, scales, offsets), Part(codes >> 4, scales, offsets)


def _q4_1(blocks: Bytes) -> tuple[Part, ...]:
    halves, codes = halves_of(words(blocks, 0, 2, "<u2")), _packed(blocks, 4)
    scales, offsets = halves[..., 0], halves[..., 1]
    return Part(codes & 15, scales, offsets), Part(codes >> 4, scales, offsets)


def _q4_k(blocks: Bytes) -> tuple[Part, ...]:
    """Eight sub-blocks of 32 per block, the even ones in low nibbles, the odd ones in high ones."""
    rows, n_blocks = blocks.shape[:2]
    halves = halves_of(words(blocks, 0, 2, "<u2"))
    scales, offsets = k_scales(blocks[..., 4:16])
    d = (halves[..., :1] * scales).reshape(rows, n_blocks * 4, 2)
    m = (halves[..., 1:] * offsets).reshape(rows, n_blocks * 4, 2)
    codes = _packed(blocks, 16).reshape(rows, n_blocks * 4, 32)
    return Part(codes & 15, d[..., 0], -m[..., 0]), Part(codes >> 4, d[..., 1], -m[..., 1])


SPLITS: dict[GGMLType, Split] = {
    GGMLType.Q8_0: Split(1, 32, _q8_0),
    GGMLType.Q4_0: Split(2, 16, _q4_0),
    GGMLType.Q4_1: Split(2, 16, _q4_1),
    GGMLType.Q4_K: Split(2, 32, _q4_k),
}


def dot_rows(type_: GGMLType, packed: Bytes, x: Floats, workers: Workers) -> Floats:
    """Products [rows] of packed rows [rows, row bytes] with one vector [k], for a type in `SPLITS`."""
    n_parts, width, parts_of = SPLITS[type_]
    blocks = packed.reshape(len(packed), -1, TRAITS[type_].block_bytes)
    pieces = x.reshape(-1, n_parts, width)
    result: Floats = np.zeros(len(packed), np.float32)
    for i, (codes, scales, offsets) in enumerate(parts_of(blocks)):
        values = workers.scratch(codes.size).reshape(codes.shape)
        np.copyto(values, codes)
        piece = pieces[:, i]
        dots = np.matmul(values.transpose(1, 0, 2), piece[:, :, None])[:, :, 0]  # [groups, rows]
        result += np.einsum("gr,rg->r", dots, scales)
        if offsets is not None:
            result += offsets @ piece.sum(axis=1)
    return result
