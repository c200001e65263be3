"""mistral3: llama with YaRN as the file describes it, and queries that grow with the position."""

from __future__ import annotations

import math
from dataclasses import replace

from app.engine.models.attention import Attention
from app.engine.models.llama import Llama
from app.engine.models.rope import read_rope


class Mistral3(Llama):
    def read(self) -> None:
        super().read()
        self.rope = read_rope(self.keys, self.rope_mode, self.p.n_rot, own_betas=True)
        self.temperature = self.keys.number("attention.temperature_scale", 0.0)

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), temperature=self.temperature != 0.0)

    def attn_scale(self, position: int) -> float:
        """1 + s ln(1 + floor(position / original context))."""
        return 1.0 + self.temperature * math.log(position // self.rope.n_ctx_orig + 1)
