"""granite and granitemoe: llama with multipliers on embeddings, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from app.engine.graph import Tensor
from app.engine.models.attention import Attention
from app.engine.models.decoder import Decoder
from app.engine.models.feed_forward import declare_shared_expert, shared_expert
from app.engine.models.rope import factor_tensor
from app.engine.models.scope import Scope
from app.engine.models.weights import LayerWeights


class Granite(Decoder):
    """A multiplier that is absent or 0 means 1. Files that were not fine-tuned for rotation have none."""

    def read(self) -> None:
        super().read()
        self.rope_factors = factor_tensor(self.keys, self.n_ctx)
        self.embed_scale = self.keys.number("embedding_scale", 0.0) or 1.0
        self.residual_scale = self.keys.number("residual_scale", 0.0) or 1.0
        self.logit_scale = self.keys.number("logit_scale") or 1.0
        self.attn_scale_ = self.keys.number("attention.scale", 0.0) or self.p.attn_scale
        self.rotates = self.keys.flag("rope.scaling.finetuned", True)

    def attention(self, layer: int) -> Attention:
        rope = self.rope if self.rotates else None
        return replace(super().attention(layer), scale=self.attn_scale_, rope=rope)

    def declare_feed_forward(self, w: LayerWeights) -> None:
        super().declare_feed_forward(w)
        if self.p.experts is not None and self.p.experts.n_ff_shared:
            declare_shared_expert(w, self.n_embd, self.p.experts.n_ff_shared)

    def layer(self, s: Scope, x: Tensor) -> Tensor:
        a = self.mix(s, s.rms_norm(x, "attn_norm"))
        x = s.g.add(self._scaled(s, a), s.wanted(x))
        f = self.feed_forward(s, s.rms_norm(x, "ffn_norm"))
        return s.g.add(self._scaled(s, f), x)

    def feed_forward(self, s: Scope, h: Tensor) -> Tensor:
        f = super().feed_forward(s, h)
        if self.p.experts is not None and self.p.experts.n_ff_shared:
            f = s.g.add(f, shared_expert(s, h))
        return f

    def _scaled(self, s: Scope, x: Tensor) -> Tensor:
        return s.g.scale(x, self.residual_scale) if self.residual_scale != 1.0 else x

    def head(self, s: Scope, x: Tensor, *, hidden: bool) -> Tensor:
        logits = super().head(s, x, hidden=hidden)
        return logits if hidden else s.g.scale(logits, 1.0 / self.logit_scale)
