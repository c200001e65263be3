"""gemma3: norms before and behind every part, five windowed layers to one that sees everything, GELU."""

from __future__ import annotations

import math
from dataclasses import replace

from app.engine.ggml import GluOp, RopeMode, UnaryOp
from app.engine.graph import Tensor
from app.engine.models.attention import Attention
from app.engine.models.decoder import Decoder
from app.engine.models.feed_forward import gated
from app.engine.models.rope import read_freq_base, read_rope
from app.engine.models.scope import Scope
from app.engine.models.weights import LayerWeights
from app.engine.models.windows import read_window, windowed_layers

#: The 27B model scales its queries by the width of an embedding per head, not by the head size.
_LAYERS_OF_27B = 62


class Gemma3(Decoder):
    """Windowed layers rotate with a base of their own and without scaling."""

    rope_mode = RopeMode.NEOX

    def read(self) -> None:
        super().read()
        self.embed_scale = math.sqrt(self.n_embd)
        window = read_window(self.keys, 0)
        self.windows = (window,) if window else ()
        self.is_windowed = windowed_layers(self.keys, self.p.n_blocks, 6) if window else (False,) * self.p.n_blocks
        local_base = read_freq_base(self.keys, "rope.freq_base_swa")
        self.local_rope = read_rope(self.keys, self.rope_mode, self.p.n_rot, freq_base=local_base, scaled=False)
        self.logit_softcap = self.keys.number("final_logit_softcapping", 0.0)
        width = self.n_embd / self.p.n_heads[0] if self.n_layers == _LAYERS_OF_27B else self.p.key_length
        self.q_scale = 1.0 / math.sqrt(width)

    def attention(self, layer: int) -> Attention:
        windowed = self.is_windowed[layer]
        return replace(
            super().attention(layer),
            qk_norm=True,
            scale=1.0,
            q_scale=self.q_scale,
            windowed=windowed,
            rope=self.local_rope if windowed else self.rope,
        )

    def declare_layer(self, w: LayerWeights) -> None:
        super().declare_layer(w)
        w.need("post_attention_norm.weight", self.n_embd)
        w.need("post_ffw_norm.weight", self.n_embd)

    def layer(self, s: Scope, x: Tensor) -> Tensor:
        a = self.mix(s, s.rms_norm(x, "attn_norm"))
        x = s.wanted(x)
        x = s.g.add(s.rms_norm(a, "post_attention_norm"), x)
        f = gated(s, s.rms_norm(x, "ffn_norm"), glu=GluOp.GEGLU)
        return s.g.add(s.rms_norm(f, "post_ffw_norm"), x)

    def head(self, s: Scope, x: Tensor, *, hidden: bool) -> Tensor:
        logits = super().head(s, x, hidden=hidden)
        if hidden or self.logit_softcap == 0.0:
            return logits
        squashed = s.g.unary(UnaryOp.TANH, s.g.scale(logits, 1.0 / self.logit_softcap))
        return s.g.scale(squashed, self.logit_softcap)
