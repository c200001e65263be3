"""The gated delta net: a linear-attention mixer whose state is a matrix per head, behind a short convolution.

Per value head, with state S [keys, values], log decay g <= 0 and gate beta, token by token:
S = e^g S; d = beta (v - S^T k); S = S + k d^T; o = S^T q / sqrt(keys).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.engine.ggml import GGMLType, UnaryOp
from app.engine.graph import Tensor
from app.engine.models.base import CacheSpec, InputKind
from app.engine.models.hparams import Keys
from app.engine.models.scope import Scope, cache_name
from app.engine.models.weights import LayerWeights

_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes. Keys and values of a head have `head` channels each.

    `grouped`: value head j reads key head j // (n_value_heads / n_key_heads), and betas and alphas come from one
    matrix; otherwise it reads j mod n_key_heads, and they have a matrix each.
    """

    n_key_heads: int
    n_value_heads: int
    head: int
    kernel: int
    grouped: bool = False

    @property
    def key_channels(self) -> int:
        return self.n_key_heads * self.head

    @property
    def value_channels(self) -> int:
        return self.n_value_heads * self.head

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_channels + self.value_channels

    @property
    def conv_elements(self) -> int:
        """Floats of convolution state per sequence: the last kernel - 1 inputs of every channel, time fastest."""
        return (self.kernel - 1) * self.conv_channels

    @property
    def state_elements(self) -> int:
        """Floats of recurrent state per sequence: per value head a matrix, keys fastest."""
        return self.head * self.value_channels


def read_delta_net(keys: Keys, *, grouped: bool) -> DeltaNet:
    net = DeltaNet(
        n_key_heads=keys.integer("ssm.group_count"),
        n_value_heads=keys.integer("ssm.time_step_rank"),
        head=keys.integer("ssm.state_size"),
        kernel=keys.integer("ssm.conv_kernel"),
        grouped=grouped,
    )
    if min(net.n_key_heads, net.n_value_heads, net.head) < 1 or net.kernel < 2:
        raise keys.error(f"a delta net of {net} makes no sense")
    if net.n_value_heads % net.n_key_heads or keys.integer("ssm.inner_size") != net.value_channels:
        raise keys.error(
            f"{net.n_value_heads} value heads of {net.head} on {net.n_key_heads} key heads do not make an inner size "
            f"of {keys.integer('ssm.inner_size')}"
        )
    return net


def declare_delta_net(w: LayerWeights, d: DeltaNet, n_embd: int) -> None:
    if d.grouped and w.has("ssm_in.weight"):
        w.linear("ssm_in", n_embd, d.conv_channels + d.value_channels)
    else:
        w.linear("attn_qkv", n_embd, d.conv_channels)
        w.linear("attn_gate", n_embd, d.value_channels)
    w.need("ssm_conv1d.weight", d.kernel, d.conv_channels)
    if d.grouped:
        w.linear("ssm_ba", n_embd, 2 * d.n_value_heads)
    else:
        w.linear("ssm_beta", n_embd, d.n_value_heads)
        w.linear("ssm_alpha", n_embd, d.n_value_heads)
    w.need("ssm_dt.bias", d.n_value_heads)
    w.need("ssm_a", d.n_value_heads)
    w.need("ssm_norm.weight", d.head)
    w.linear("ssm_out", d.value_channels, n_embd)


def delta_net_caches(d: DeltaNet, layer: int) -> list[CacheSpec]:
    return [
        CacheSpec(cache_name("r", layer), layer, "conv", d.conv_elements, GGMLType.F32, "slot"),
        CacheSpec(cache_name("s", layer), layer, "ssm", d.state_elements, GGMLType.F32, "slot"),
    ]


def delta_net(s: Scope, h: Tensor, d: DeltaNet) -> Tensor:
    """[n_embd, n] to the wanted rows; reads each sequence's state by STATE_SLOTS and writes it by STATE_ROWS."""
    g, t, b = s.g, s.batch.seq_tokens, s.batch.n_seqs
    mixed, z = _project(s, h, d)
    beta, decay = _gates(s, h, d)
    convolved = _convolve(s, g.reshape(mixed, d.conv_channels, t, b), d)
    q = _key_heads(s, convolved, d, 0)
    k = _key_heads(s, convolved, d, d.key_channels)
    v = _heads(s, convolved, d, 2 * d.key_channels, d.n_value_heads)
    state = g.get_rows(s.cache("s"), s.input(InputKind.STATE_SLOTS))
    packed = g.gated_delta_net(q, k, v, decay, beta, g.reshape(state, d.head, d.head, d.n_value_heads, b))
    n_outputs = d.value_channels * t * b
    row_bytes = d.state_elements * _F32_BYTES
    new_state = g.view(packed, (d.state_elements, b), (row_bytes,), n_outputs * _F32_BYTES)
    g.set_rows(s.cache("s"), new_state, s.input(InputKind.STATE_ROWS))
    heads = g.view(packed, (d.head, d.n_value_heads * t * b), (d.head * _F32_BYTES,))
    gate = g.unary(UnaryOp.SILU, g.reshape(z, d.head, d.n_value_heads * t * b))
    out = g.mul(s.rms_norm(heads, "ssm_norm"), gate)
    return s.linear(s.wanted(g.reshape(out, d.value_channels, t * b)), "ssm_out")


def _project(s: Scope, h: Tensor, d: DeltaNet) -> tuple[Tensor, Tensor]:
    """Inputs of the convolution [q | k | v, n], and the output gate z [value channels, n].

    Older files have one matrix instead, whose rows are q, k, v, z of the first key head, then of the next.
    """
    g = s.g
    if s.optional("ssm_in.weight") is None:
        return s.linear(h, "attn_qkv"), s.linear(h, "attn_gate")
    both = s.linear(h, "ssm_in")
    n = both.ne[1]
    values = d.value_channels // d.n_key_heads
    strides = (2 * (d.head + values) * _F32_BYTES, both.nb[1])

    def part(width: int, first: int) -> Tensor:
        window = g.view(both, (width, d.n_key_heads, n), strides, first * _F32_BYTES)
        return g.cont(window, width * d.n_key_heads, n)

    q, k = part(d.head, 0), part(d.head, d.head)
    v, z = part(values, 2 * d.head), part(values, 2 * d.head + values)
    return g.concat(g.concat(q, k, 0), v, 0), z


def _gates(s: Scope, h: Tensor, d: DeltaNet) -> tuple[Tensor, Tensor]:
    """beta and the log decay, each [1, value heads, t, b]."""
    g, n, t, b = s.g, d.n_value_heads, s.batch.seq_tokens, s.batch.n_seqs
    if d.grouped:
        both = s.linear(h, "ssm_ba")
        share = n // d.n_key_heads
        strides = (2 * share * _F32_BYTES, both.nb[1])
        part = (share, d.n_key_heads, t * b)
        raw_beta = g.cont(g.view(both, part, strides), n, t * b)
        alpha = g.cont(g.view(both, part, strides, share * _F32_BYTES), n, t * b)
    else:
        raw_beta, alpha = s.linear(h, "ssm_beta"), s.linear(h, "ssm_alpha")
    beta = g.unary(UnaryOp.SIGMOID, g.reshape(raw_beta, 1, n, t, b))
    step = g.unary(UnaryOp.SOFTPLUS, g.add(alpha, s.weight("ssm_dt.bias")))
    return beta, g.reshape(g.mul(step, s.weight("ssm_a")), 1, n, t, b)


def _convolve(s: Scope, mixed: Tensor, d: DeltaNet) -> Tensor:
    """Depthwise causal convolution with SiLU, [channels, t, b]; the last inputs become the new state."""
    g, t, b = s.g, s.batch.seq_tokens, s.batch.n_seqs
    kept = d.kernel - 1
    before = g.get_rows(s.cache("r"), s.input(InputKind.STATE_SLOTS))
    inputs = g.concat(g.reshape(before, kept, d.conv_channels, b), g.transpose(mixed), 0)
    last = g.view(inputs, (kept, d.conv_channels, b), inputs.nb[1:3], t * inputs.nb[0])
    g.set_rows(s.cache("r"), g.cont(last, d.conv_elements, b), s.input(InputKind.STATE_ROWS))
    return g.unary(UnaryOp.SILU, g.ssm_conv(inputs, s.weight("ssm_conv1d.weight")))


def _heads(s: Scope, convolved: Tensor, d: DeltaNet, first: int, n_heads: int) -> Tensor:
    """Channels from `first` on as heads [head, n_heads, t, b]."""
    strides = (d.head * _F32_BYTES, convolved.nb[1], convolved.nb[2])
    return s.g.view(convolved, (d.head, n_heads, *convolved.ne[1:3]), strides, first * _F32_BYTES)


def _key_heads(s: Scope, convolved: Tensor, d: DeltaNet, first: int) -> Tensor:
    """Queries or keys, each head divided by sqrt(its sum of squares + eps)."""
    g = s.g
    heads = _heads(s, convolved, d, first, d.n_key_heads)
    unit = g.scale(g.rms_norm(heads, s.eps / d.head), 1.0 / math.sqrt(d.head))
    if not d.grouped or d.n_key_heads == d.n_value_heads:
        return unit
    share, n = d.n_value_heads // d.n_key_heads, s.batch.n_tokens
    each = g.repeat(g.reshape(unit, d.head, 1, d.n_key_heads, n), d.head, share, d.n_key_heads, n)
    return g.reshape(each, d.head, d.n_value_heads, *convolved.ne[1:3])
