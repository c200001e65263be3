"""Rotary position embeddings as the ROPE op takes them."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.ggml import RopeMode


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Parameters of ROPE.

    `attn_factor` is what the op is given: with YaRN the op itself multiplies it by 1 + 0.1 ln(1 / freq_scale).
    """

    n_dims: int
    mode: RopeMode
    n_ctx_orig: int
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    sections: tuple[int, int, int, int] = (0, 0, 0, 0)
