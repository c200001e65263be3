"""qwen2: Qwen 1.5 to 2.5, with biases on queries, keys and values."""

from __future__ import annotations

from app.engine.ggml import RopeMode
from app.engine.models.decoder import Decoder


class Qwen2(Decoder):
    rope_mode = RopeMode.NEOX
