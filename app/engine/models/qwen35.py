"""qwen35, qwen35moe and qwen3next: delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from app.engine.ggml import RopeMode
from app.engine.graph import Tensor
from app.engine.models.attention import Attention, attention_caches, declare_attention, self_attention
from app.engine.models.base import CacheSpec, InputKind
from app.engine.models.decoder import Decoder
from app.engine.models.delta_net import declare_delta_net, delta_net, delta_net_caches, read_delta_net
from app.engine.models.feed_forward import Mixture, declare_shared_expert, narrow_experts, shared_expert
from app.engine.models.rope import read_sections
from app.engine.models.scope import Scope
from app.engine.models.weights import LayerWeights


class Qwen35(Decoder):
    """Dense, or with experts and a gated shared expert. Blocks behind the last layer predict further tokens; unused."""

    rope_mode = RopeMode.IMROPE
    ffn_norm = "post_attention_norm"
    has_state = True
    grouped_heads: ClassVar[bool] = False

    def read(self) -> None:
        super().read()
        if self.rope_mode is RopeMode.IMROPE:
            self.rope = replace(self.rope, sections=read_sections(self.keys))
            self.position_streams = 4
        self.net = read_delta_net(self.keys, grouped=self.grouped_heads)
        self.is_recurrent = self._recurrent_layers()
        experts = self.p.experts
        self.n_ff_shared = (experts.n_ff_shared or self.p.n_ff[0]) if experts is not None else 0

    def read_mixture(self) -> Mixture | None:
        return narrow_experts(self.p)

    def _recurrent_layers(self) -> tuple[bool, ...]:
        if self.keys.has("attention.recurrent_layers"):
            return tuple(map(bool, self.keys.per_block("attention.recurrent_layers", self.p.n_blocks)))
        interval = self.keys.integer("full_attention_interval", 4)
        if interval < 1:
            raise self.keys.wrong("full_attention_interval", interval, "1 or more layers")
        return tuple((layer + 1) % interval != 0 for layer in range(self.p.n_blocks))

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), qk_norm=True, gated=True)

    def declare_layer(self, w: LayerWeights) -> None:
        w.need("attn_norm.weight", self.n_embd)
        if self.is_recurrent[w.index]:
            declare_delta_net(w, self.net, self.n_embd)
        else:
            declare_attention(w, self.attention(w.index), self.n_embd)
        w.need(f"{self.ffn_norm}.weight", self.n_embd)
        self.declare_feed_forward(w)

    def declare_feed_forward(self, w: LayerWeights) -> None:
        super().declare_feed_forward(w)
        if self.n_ff_shared:
            declare_shared_expert(w, self.n_embd, self.n_ff_shared)

    def layer_caches(self, layer: int) -> list[CacheSpec]:
        if self.is_recurrent[layer]:
            return delta_net_caches(self.net, layer)
        return attention_caches(self.attention(layer), layer)

    def layer_inputs(self, layer: int) -> set[InputKind]:
        if self.is_recurrent[layer]:
            return {InputKind.STATE_SLOTS, InputKind.STATE_ROWS}
        return super().layer_inputs(layer)

    def mix(self, s: Scope, h: Tensor) -> Tensor:
        if self.is_recurrent[s.layer]:
            return delta_net(s, h, self.net)
        return self_attention(s, h, self.attention(s.layer))

    def feed_forward(self, s: Scope, h: Tensor) -> Tensor:
        f = super().feed_forward(s, h)
        return s.g.add(f, shared_expert(s, h)) if self.n_ff_shared else f


class Qwen3Next(Qwen35):
    """The family's first form: plain rotation, value heads grouped by key head."""

    rope_mode = RopeMode.NEOX
    grouped_heads = True
