"""Packed rows to float32 and back: every type that model files hold, and the types a KV cache may have.

Decoders are vectorised over a tile of rows with few temporaries, because the numpy device calls them on tiles of
weights. The arithmetic is float32 in the order of ggml's own decoders, so results agree with them bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import TRAITS, GGMLType
from app.engine.gguf.quants import codebook, kquants, plain, simple, ternary
from app.engine.gguf.quants.blocks import Decoder, Encoder
from app.engine.gguf.quants.encode import ENCODERS

DECODERS: dict[GGMLType, Decoder] = {
    **plain.DECODERS,
    **simple.DECODERS,
    **kquants.DECODERS,
    **ternary.DECODERS,
    **codebook.DECODERS,
}

__all__ = ["DECODERS", "ENCODERS", "Decoder", "Encoder", "dequantize", "quantize"]


def dequantize(type_: GGMLType, raw: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Unpack rows: uint8 [rows, row_bytes] to float32 [rows, n]; into `out` if given. Rows may be strided.

    Raises ValueError for a type that has no values of its own (integers, activation formats) and for a wrong shape.
    """
    decode = DECODERS.get(type_)
    if decode is None:
        raise ValueError(f"type {type_.name} cannot be read as numbers; known are {_names(DECODERS)}")
    elements, n_bytes = TRAITS[type_]
    if raw.ndim != 2 or raw.shape[1] % n_bytes:
        raise ValueError(f"rows of type {type_.name} are multiples of {n_bytes} bytes, got shape {raw.shape}")
    n_rows, n_blocks = raw.shape[0], raw.shape[1] // n_bytes
    if out is None:
        out = np.empty((n_rows, n_blocks * elements), np.float32)
    elif out.shape != (n_rows, n_blocks * elements):
        raise ValueError(f"{n_rows} rows of {n_blocks * elements} elements do not fit an array of shape {out.shape}")
    if out.size:
        decode(_split(raw, n_blocks, n_bytes), _split(out, n_blocks, elements))
    return out


def quantize(type_: GGMLType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pack rows: float32 [rows, n] to uint8 [rows, row_bytes], rounding as ggml's reference encoders do.

    Raises ValueError for a type no cache may have and for rows that are not whole blocks.
    """
    encode = ENCODERS.get(type_)
    if encode is None:
        raise ValueError(f"type {type_.name} cannot be written; known are {_names(ENCODERS)}")
    elements, n_bytes = TRAITS[type_]
    if values.ndim != 2 or values.shape[1] % elements:
        raise ValueError(f"rows of type {type_.name} are multiples of {elements} elements, got shape {values.shape}")
    n_rows, n_blocks = values.shape[0], values.shape[1] // elements
    raw = np.empty((n_rows, n_blocks * n_bytes), np.uint8)
    if raw.size:
        encode(_split(values, n_blocks, elements), _split(raw, n_blocks, n_bytes))
    return raw


def _split(array: NDArray[Any], n_blocks: int, width: int) -> NDArray[Any]:
    """Rows seen as blocks; a view whenever the elements of a row are adjacent."""
    return array.reshape(array.shape[0], n_blocks, width)


def _names(table: dict[GGMLType, Any]) -> str:
    return ", ".join(t.name for t in sorted(table))
