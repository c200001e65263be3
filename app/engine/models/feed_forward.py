"""Feed-forward parts: gated, and mixtures of gated experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from app.engine.ggml import GluOp, UnaryOp
from app.engine.graph import Tensor
from app.engine.models.hparams import Hyperparameters
from app.engine.models.scope import Scope
from app.engine.models.weights import LayerWeights

#: What the sum of the chosen experts' weights is at least taken for: the smallest normal half, 2^-14.
MIN_WEIGHT_SUM = 2.0**-14


def declare_gated(w: LayerWeights, n_embd: int, n_ff: int, suffix: str = "") -> None:
    w.linear(f"ffn_gate{suffix}", n_embd, n_ff)
    w.linear(f"ffn_up{suffix}", n_embd, n_ff)
    w.linear(f"ffn_down{suffix}", n_ff, n_embd)


def gated(s: Scope, h: Tensor, suffix: str = "", glu: GluOp = GluOp.SWIGLU) -> Tensor:
    """down(act(gate h) * up h)."""
    gate = s.linear(h, f"ffn_gate{suffix}")
    up = s.linear(h, f"ffn_up{suffix}")
    return s.linear(s.g.glu(glu, gate, up), f"ffn_down{suffix}")


class Gating(Enum):
    """How router logits become weights of the chosen experts."""

    SOFTMAX = "softmax over all experts"
    SOFTMAX_CHOSEN = "softmax over the chosen experts"


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts. `normalise`: the chosen weights are divided by their sum."""

    n_experts: int
    n_used: int
    n_ff: int
    gating: Gating = Gating.SOFTMAX
    normalise: bool = True
    glu: GluOp = GluOp.SWIGLU
    glu_alpha: float = 0.0
    glu_limit: float = 0.0


def narrow_experts(p: Hyperparameters) -> Mixture | None:
    """Experts with a width of their own, or so wide that those used add up to the dense part."""
    if p.experts is None:
        return None
    return Mixture(p.experts.n_experts, p.experts.n_used, p.experts.n_ff or p.n_ff[0] // p.experts.n_used)


def declare_mixture(w: LayerWeights, m: Mixture, n_embd: int) -> None:
    w.need("ffn_gate_inp.weight", n_embd, m.n_experts)
    w.may("ffn_gate_inp.bias", m.n_experts)
    if w.has("ffn_gate_up_exps.weight"):
        w.experts("ffn_gate_up_exps", n_embd, 2 * m.n_ff, m.n_experts)
    else:
        w.experts("ffn_gate_exps", n_embd, m.n_ff, m.n_experts)
        w.experts("ffn_up_exps", n_embd, m.n_ff, m.n_experts)
    w.experts("ffn_down_exps", m.n_ff, n_embd, m.n_experts)


def mixture(s: Scope, h: Tensor, m: Mixture) -> Tensor:
    """The weighted sum of the chosen experts, added in the order in which they were chosen."""
    g, n_embd, n_tokens = s.g, h.ne[0], h.ne[1]
    ids, weights = _route(s, h, m)
    rows = g.reshape(h, n_embd, 1, n_tokens)
    if s.optional("ffn_gate_up_exps.weight") is not None:
        both = _experts(s, rows, "ffn_gate_up_exps", ids)
        half = (m.n_ff, m.n_used, n_tokens)
        gate = g.view(both, half, both.nb[1:3])
        up = g.view(both, half, both.nb[1:3], m.n_ff * both.nb[0])
    else:
        gate = _experts(s, rows, "ffn_gate_exps", ids)
        up = _experts(s, rows, "ffn_up_exps", ids)
    active = g.glu(m.glu, gate, up, alpha=m.glu_alpha, limit=m.glu_limit)
    answers = g.mul(_experts(s, active, "ffn_down_exps", ids), weights)
    parts = [g.view(answers, (n_embd, n_tokens), (answers.nb[2],), i * answers.nb[1]) for i in range(m.n_used)]
    if m.n_used == 1:
        return g.cont(parts[0])
    total = parts[0]
    for part in parts[1:]:
        total = g.add(total, part)
    return total


def _route(s: Scope, h: Tensor, m: Mixture) -> tuple[Tensor, Tensor]:
    """Ids [n_used, n] and weights [1, n_used, n] of the chosen experts."""
    g, n_tokens = s.g, h.ne[1]
    logits = s.linear(h, "ffn_gate_inp")
    probabilities = g.soft_max(logits) if m.gating is Gating.SOFTMAX else logits
    order = g.argsort(probabilities)
    ids = g.view(order, (m.n_used, n_tokens), (order.nb[1],))
    weights = g.get_rows(g.reshape(probabilities, 1, m.n_experts, n_tokens), ids)
    if m.gating is Gating.SOFTMAX_CHOSEN:
        weights = g.reshape(g.soft_max(g.reshape(weights, m.n_used, n_tokens)), 1, m.n_used, n_tokens)
    if m.normalise:
        flat = g.reshape(weights, m.n_used, n_tokens)
        flat = g.div(flat, g.clamp(g.sum_rows(flat), MIN_WEIGHT_SUM, math.inf))
        weights = g.reshape(flat, 1, m.n_used, n_tokens)
    return ids, weights


def _experts(s: Scope, x: Tensor, name: str, ids: Tensor) -> Tensor:
    """The chosen experts' products, times their scales and plus their biases where the file has them."""
    g = s.g
    y = g.mul_mat_id(s.weight(f"{name}.weight"), x, ids)
    scale, bias = s.optional(f"{name}.scale"), s.optional(f"{name}.bias")
    if scale is not None:
        tiled = g.repeat(g.reshape(scale, 1, scale.ne[0]), 1, scale.ne[0], ids.ne[1])
        y = g.mul(y, g.get_rows(tiled, ids))
    return y if bias is None else g.add_id(y, bias, ids)


def declare_shared_expert(w: LayerWeights, n_embd: int, n_ff: int) -> None:
    """An expert that every token visits, with a gate of its own where the file has one."""
    w.may("ffn_gate_inp_shexp.weight", n_embd)
    declare_gated(w, n_embd, n_ff, "_shexp")


def shared_expert(s: Scope, h: Tensor) -> Tensor:
    """The shared expert's answer, times the sigmoid of its gate."""
    answer = gated(s, h, "_shexp")
    gate = s.optional("ffn_gate_inp_shexp.weight")
    if gate is None:
        return answer
    return s.g.mul(answer, s.g.unary(UnaryOp.SIGMOID, s.g.mul_mat(gate, h)))
