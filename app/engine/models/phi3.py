"""phi3: Phi 3 to 4, with fused projections and rope factors chosen by the context's length."""

from __future__ import annotations

from dataclasses import replace

from app.engine.ggml import GluOp, RopeMode
from app.engine.graph import Tensor
from app.engine.models.attention import Attention
from app.engine.models.decoder import Decoder
from app.engine.models.rope import factor_tensor_by_context
from app.engine.models.scope import Scope
from app.engine.models.weights import LayerWeights


class Phi3(Decoder):
    """The sliding window some files name is not used: every layer sees everything.

    The two sets of rope factors count whatever scaling the file names; most files name none.
    """

    rope_mode = RopeMode.NEOX

    def read(self) -> None:
        super().read()
        self.rope_factors = factor_tensor_by_context(self.keys, self.n_ctx)

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), scale=1.0, q_scale=self.p.attn_scale)

    def declare_layer(self, w: LayerWeights) -> None:
        super().declare_layer(w)
        w.may("attn_norm.bias", self.n_embd)
        w.may("ffn_norm.bias", self.n_embd)

    def declare_feed_forward(self, w: LayerWeights) -> None:
        n_ff = self.p.n_ff[w.index]
        w.linear("ffn_up", self.n_embd, 2 * n_ff)
        w.linear("ffn_down", n_ff, self.n_embd)

    def feed_forward(self, s: Scope, h: Tensor) -> Tensor:
        """The first half of the wide projection is the gate."""
        return s.linear(s.g.glu(GluOp.SWIGLU, s.linear(h, "ffn_up")), "ffn_down")
