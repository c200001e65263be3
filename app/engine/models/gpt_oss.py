"""gpt-oss: experts with biases and a clamped activation, attention sinks, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from app.engine.ggml import GluOp, RopeMode
from app.engine.models.attention import Attention
from app.engine.models.decoder import Decoder
from app.engine.models.feed_forward import Gating, Mixture
from app.engine.models.weights import LayerWeights
from app.engine.models.windows import read_window, windowed_layers

_ALPHA, _LIMIT = 1.702, 7.0


class GptOss(Decoder):
    rope_mode = RopeMode.NEOX
    ffn_norm = "post_attention_norm"

    def read(self) -> None:
        super().read()
        window = read_window(self.keys)
        self.windows = (window,) if window else ()
        self.is_windowed = windowed_layers(self.keys, self.p.n_blocks, 2) if window else (False,) * self.p.n_blocks

    def read_mixture(self) -> Mixture:
        return Mixture(
            self.keys.integer("expert_count"),
            self.keys.uniform("expert_used_count"),
            self.keys.uniform("expert_feed_forward_length"),
            gating=Gating.SOFTMAX_CHOSEN,
            normalise=False,
            glu=GluOp.SWIGLU_OAI,
            glu_alpha=_ALPHA,
            glu_limit=_LIMIT,
        )

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), windowed=self.is_windowed[layer])

    def declare_layer(self, w: LayerWeights) -> None:
        super().declare_layer(w)
        w.need("attn_sinks.weight", self.p.n_heads[w.index])
