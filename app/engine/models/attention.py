"""Self-attention over the KV cache: weights, caches and graph."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.ggml import UnaryOp, row_bytes
from app.engine.graph import Tensor
from app.engine.models.base import CacheSpec, InputKind
from app.engine.models.hparams import Hyperparameters
from app.engine.models.scope import Scope, cache_name
from app.engine.models.weights import LayerWeights
from app.engine.rope import RopeParams


@dataclass(frozen=True, slots=True)
class Attention:
    """How one layer attends. Query head h reads key-value head h // (n_heads / n_kv_heads).

    `scale` multiplies q.k; with `q_scale` not 1 the queries are multiplied before. `windowed` layers look through the
    mask of the sliding window. `rope_factors` names a tensor of frequency factors. `temperature`: queries are
    multiplied by the input ATTN_SCALE. `gated`: every query head is followed by a gate as wide, whose sigmoid
    multiplies what the head found.
    """

    n_heads: int
    n_kv_heads: int
    key_length: int
    value_length: int
    scale: float
    rope: RopeParams | None
    rope_factors: str | None = None
    q_scale: float = 1.0
    qk_norm: bool = False
    windowed: bool = False
    temperature: bool = False
    gated: bool = False

    @classmethod
    def of(cls, p: Hyperparameters, layer: int, rope: RopeParams | None, rope_factors: str | None = None) -> Attention:
        """The ordinary case."""
        return cls(
            n_heads=p.n_heads[layer],
            n_kv_heads=p.n_kv_heads[layer],
            key_length=p.key_length,
            value_length=p.value_length,
            scale=p.attn_scale,
            rope=rope,
            rope_factors=rope_factors,
        )

    @property
    def q_length(self) -> int:
        """Channels of the query projection per head."""
        return 2 * self.key_length if self.gated else self.key_length

    @property
    def k_elements(self) -> int:
        return self.key_length * self.n_kv_heads

    @property
    def v_elements(self) -> int:
        return self.value_length * self.n_kv_heads


def declare_attention(w: LayerWeights, a: Attention, n_embd: int) -> None:
    """Separate projections, or one fused with rows q, k, v; biases where the file has them."""
    n_q = a.n_heads * a.q_length
    if w.has("attn_qkv.weight"):
        w.linear("attn_qkv", n_embd, n_q + a.k_elements + a.v_elements)
        for name, n in (("attn_q", n_q), ("attn_k", a.k_elements), ("attn_v", a.v_elements)):
            w.may(f"{name}.bias", n)
    else:
        w.linear("attn_q", n_embd, n_q)
        w.linear("attn_k", n_embd, a.k_elements)
        w.linear("attn_v", n_embd, a.v_elements)
    declare_qk_norm(w, a)
    w.linear("attn_output", a.n_heads * a.value_length, n_embd)


def declare_qk_norm(w: LayerWeights, a: Attention) -> None:
    if a.qk_norm:
        w.need("attn_q_norm.weight", a.key_length)
        w.need("attn_k_norm.weight", a.key_length)


def attention_caches(a: Attention, layer: int) -> list[CacheSpec]:
    return [
        CacheSpec(cache_name("k", layer), layer, "k", a.k_elements, None, "cell", a.key_length),
        CacheSpec(cache_name("v", layer), layer, "v", a.v_elements, None, "cell", a.value_length),
    ]


def self_attention(s: Scope, h: Tensor, a: Attention) -> Tensor:
    """Project, rotate, store, attend, project the wanted rows back: [n_embd, n] to [n_embd, n] or fewer."""
    q, k, v = _project(s, h, a)
    q, gate = _split_gate(s, q, a)
    q, k = _prepare(s, q, a, "attn_q_norm", query=True), _prepare(s, k, a, "attn_k_norm")
    found = _attend(s, q, k, v, a)
    if gate is not None:
        found = s.g.mul(found, s.g.unary(UnaryOp.SIGMOID, gate))
    return s.linear(s.wanted(found), "attn_output")


def _split_gate(s: Scope, q: Tensor, a: Attention) -> tuple[Tensor, Tensor | None]:
    """Query heads [length, heads, n], and their gates packed as [length * heads, n]."""
    if not a.gated:
        return q, None
    size = (a.key_length, *q.ne[1:3])
    gate = s.g.view(q, size, q.nb[1:3], a.key_length * q.nb[0])
    return s.g.view(q, size, q.nb[1:3]), s.g.cont(gate, a.key_length * a.n_heads, q.ne[2])


def _attend(s: Scope, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """Store k and v in the cache and look at all of it: heads [length, heads, n] to rows [value_length * heads, n]."""
    g, n_tokens = s.g, q.ne[2]
    rows = s.input(InputKind.KV_ROWS)
    k_cache, v_cache = s.cache("k"), s.cache("v")
    g.set_rows(k_cache, g.view(k, (a.k_elements, n_tokens), (k.nb[2],)), rows)
    g.set_rows(v_cache, g.view(v, (a.v_elements, n_tokens), (v.nb[2],)), rows)
    out = g.flash_attn_ext(
        g.permute(q, 0, 2, 1, 3),
        _visible(s, k_cache, a.key_length, a.n_kv_heads),
        _visible(s, v_cache, a.value_length, a.n_kv_heads),
        s.input(InputKind.MASK_SWA if a.windowed else InputKind.MASK),
        scale=a.scale,
        sinks=s.optional("attn_sinks.weight"),
    )
    return g.reshape(out, a.value_length * a.n_heads, n_tokens)


def _visible(s: Scope, cache: Tensor, length: int, n_heads: int) -> Tensor:
    """The first n_kv cells of a cache as [length, cells, heads]."""
    strides = (row_bytes(cache.type, length), cache.nb[1])
    return s.g.permute(s.g.view(cache, (length, n_heads, s.batch.n_kv), strides), 0, 2, 1, 3)


def _project(s: Scope, h: Tensor, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    g, n_tokens = s.g, h.ne[1]
    if s.optional("attn_qkv.weight") is None:
        q = g.reshape(s.linear(h, "attn_q"), a.q_length, a.n_heads, n_tokens)
        v = g.reshape(s.linear(h, "attn_v"), a.value_length, a.n_kv_heads, n_tokens)
        k = g.reshape(s.linear(h, "attn_k"), a.key_length, a.n_kv_heads, n_tokens)
        return q, k, v
    qkv = s.linear(h, "attn_qkv")
    n_q = a.n_heads * a.q_length
    q = _part(s, qkv, "attn_q", 0, a.q_length, a.n_heads)
    k = _part(s, qkv, "attn_k", n_q, a.key_length, a.n_kv_heads)
    v = _part(s, qkv, "attn_v", n_q + a.k_elements, a.value_length, a.n_kv_heads)
    return q, k, v


def _part(s: Scope, fused: Tensor, name: str, first: int, length: int, n_heads: int) -> Tensor:
    """Rows [first, first + length * n_heads) of a fused projection as heads [length, n_heads, n]."""
    strides = (row_bytes(fused.type, length), fused.nb[1])
    heads = s.g.view(fused, (length, n_heads, fused.ne[1]), strides, row_bytes(fused.type, first))
    bias = s.optional(f"{name}.bias")
    return heads if bias is None else s.g.add(heads, s.g.reshape(bias, length, n_heads))


def _prepare(s: Scope, heads: Tensor, a: Attention, norm: str, *, query: bool = False) -> Tensor:
    """Norm, rotation and scaling of query or key heads."""
    if a.qk_norm:
        heads = s.rms_norm(heads, norm)
    if a.rope is not None:
        factors = s.tensors.weights[a.rope_factors] if a.rope_factors else None
        heads = s.g.rope(heads, s.input(InputKind.POSITIONS), a.rope, factors)
    if query and a.q_scale != 1.0:
        heads = s.g.scale(heads, a.q_scale)
    if query and a.temperature:
        heads = s.g.mul(heads, s.input(InputKind.ATTN_SCALE))
    return heads
