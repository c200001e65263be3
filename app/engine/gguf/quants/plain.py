"""Float types: F32, F16, BF16."""

from __future__ import annotations

import numpy as np

from app.engine.ggml import GGMLType
from app.engine.gguf.quants.blocks import Bytes, Decoder, Floats, halves_of, words


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = words(blocks, 0, 1, "<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = halves_of(words(blocks, 0, 1, "<u2"))


def _bf16(blocks: Bytes, out: Floats) -> None:
    """The upper half of a float32."""
    wide = words(blocks, 0, 1, "<u2").astype(np.uint32)
    np.left_shift(wide, 16, out=wide)
    out[...] = wide.view(np.float32)


DECODERS: dict[GGMLType, Decoder] = {GGMLType.F32: _f32, GGMLType.F16: _f16, GGMLType.BF16: _bf16}
