"""qwen3 and qwen3moe: every query and key head is normed before it is rotated."""

from __future__ import annotations

from dataclasses import replace

from app.engine.ggml import RopeMode
from app.engine.models.attention import Attention
from app.engine.models.decoder import Decoder
from app.engine.models.feed_forward import Mixture, narrow_experts


class Qwen3(Decoder):
    """Dense, or with experts whose weights are normalised."""

    rope_mode = RopeMode.NEOX

    def read_mixture(self) -> Mixture | None:
        return narrow_experts(self.p)

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), qk_norm=True)
