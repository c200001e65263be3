"""smollm3: llama whose every fourth layer does not rotate."""

from __future__ import annotations

from dataclasses import replace

from app.engine.models.attention import Attention
from app.engine.models.decoder import Decoder

_PERIOD = 4


class SmolLM3(Decoder):
    def attention(self, layer: int) -> Attention:
        a = super().attention(layer)
        return replace(a, rope=None) if (layer + 1) % _PERIOD == 0 else a
