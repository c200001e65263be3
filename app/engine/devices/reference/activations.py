"""UNARY and GLU: functions of one value, and gated units made of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats
from app.engine.ggml import GluOp, Op, UnaryOp

Function = Callable[[Floats], Floats]

_SQRT_2_OVER_PI = np.float32(0.79788456080286535587989211986876)
_erf = np.frompyfunc(math.erf, 1, 1)


def sigmoid(x: Floats) -> Floats:
    result: Floats = np.reciprocal(np.exp(-x) + np.float32(1))
    return result


def silu(x: Floats) -> Floats:
    result: Floats = np.divide(x, np.exp(-x) + np.float32(1))
    return result


def softplus(x: Floats) -> Floats:
    """ln(1 + e^x); x itself above 20, where the two agree."""
    return np.where(x > 20, x, np.log1p(np.exp(x)))


def relu(x: Floats) -> Floats:
    result: Floats = np.maximum(x, 0)
    return result


def gelu(x: Floats) -> Floats:
    """The tanh form."""
    inner = x * (np.square(x) * np.float32(0.044715) + np.float32(1)) * _SQRT_2_OVER_PI
    result: Floats = np.multiply(x * np.float32(0.5), np.tanh(inner) + np.float32(1))
    return result


def gelu_erf(x: Floats) -> Floats:
    erf = _erf(x.astype(np.float64) / math.sqrt(2))
    return (0.5 * x * (1 + np.asarray(erf, np.float64))).astype(np.float32)


def gelu_quick(x: Floats) -> Floats:
    return x * sigmoid(np.float32(1.702) * x)


def round_away(x: Floats) -> Floats:
    """To the nearest integer, halves away from zero. In float64, where adding a half rounds nothing."""
    return np.trunc(x.astype(np.float64) + np.copysign(0.5, x)).astype(np.float32)


def hard_sigmoid(x: Floats) -> Floats:
    clipped: Floats = np.clip((x + np.float32(3)) / np.float32(6), 0, 1)
    return clipped


def xielu(n: Node) -> Function:
    """Two squares with a slope between them; the alphas come as they are used."""
    alpha_n, alpha_p, beta, eps = (np.float32(n.param_f32(i)) for i in range(1, 5))

    def apply(x: Floats) -> Floats:
        below = (np.expm1(np.minimum(x, eps)) - x) * alpha_n + beta * x
        return np.where(x > 0, alpha_p * x * x + beta * x, below)

    return apply


def _plain(function: Function) -> Callable[[Node], Function]:
    return lambda _: function


#: UnaryOp -> the function, given the node for its parameters.
UNARY: dict[UnaryOp, Callable[[Node], Function]] = {
    UnaryOp.ABS: _plain(np.abs),
    UnaryOp.SGN: _plain(np.sign),
    UnaryOp.NEG: _plain(np.negative),
    UnaryOp.STEP: _plain(lambda x: (x > 0).astype(np.float32)),
    UnaryOp.TANH: _plain(np.tanh),
    UnaryOp.ELU: _plain(lambda x: np.where(x > 0, x, np.expm1(x))),
    UnaryOp.RELU: _plain(relu),
    UnaryOp.SIGMOID: _plain(sigmoid),
    UnaryOp.GELU: _plain(gelu),
    UnaryOp.GELU_QUICK: _plain(gelu_quick),
    UnaryOp.SILU: _plain(silu),
    UnaryOp.HARDSWISH: _plain(lambda x: x * hard_sigmoid(x)),
    UnaryOp.HARDSIGMOID: _plain(hard_sigmoid),
    UnaryOp.EXP: _plain(np.exp),
    UnaryOp.EXPM1: _plain(np.expm1),
    UnaryOp.SOFTPLUS: _plain(softplus),
    UnaryOp.GELU_ERF: _plain(gelu_erf),
    UnaryOp.XIELU: xielu,
    UnaryOp.FLOOR: _plain(np.floor),
    UnaryOp.CEIL: _plain(np.ceil),
    UnaryOp.ROUND: _plain(round_away),
    UnaryOp.TRUNC: _plain(np.trunc),
}


def _unary(n: Node) -> Step:
    x, out = n.src(0), n.out
    function = UNARY[UnaryOp(n.param(0))](n)
    return lambda: out.store(function(x.load()))


def _gate(function: Function) -> Callable[[Node], Callable[[Floats, Floats], Floats]]:
    return lambda _: lambda a, b: function(a) * b


def _swiglu_oai(n: Node) -> Callable[[Floats, Floats], Floats]:
    alpha, limit = np.float32(n.param_f32(2)), np.float32(n.param_f32(3))

    def apply(a: Floats, b: Floats) -> Floats:
        x = np.minimum(a, limit)
        return x * sigmoid(alpha * x) * (np.clip(b, -limit, limit) + np.float32(1))

    return apply


def _swiglu_clamp(n: Node) -> Callable[[Floats, Floats], Floats]:
    limit = np.float32(n.param_f32(3))
    return lambda a, b: silu(np.minimum(a, limit)) * np.clip(b, -limit, limit)


#: GluOp -> the function of the two halves, given the node for its parameters.
GATED: dict[GluOp, Callable[[Node], Callable[[Floats, Floats], Floats]]] = {
    GluOp.REGLU: _gate(relu),
    GluOp.GEGLU: _gate(gelu),
    GluOp.SWIGLU: _gate(silu),
    GluOp.SWIGLU_OAI: _swiglu_oai,
    GluOp.GEGLU_ERF: _gate(gelu_erf),
    GluOp.GEGLU_QUICK: _gate(gelu_quick),
    GluOp.SWIGLU_CLAMP: _swiglu_clamp,
}


def _glu(n: Node) -> Step:
    a, b, out = n.src(0), n.optional(1), n.out
    function = GATED[GluOp(n.param(0))](n)
    if b is not None:
        return lambda: out.store(function(a.load(), b.load()))
    half, swapped = out.ne[0], bool(n.param(1))

    def step() -> None:
        x = a.load()
        left, right = x[..., :half], x[..., half:]
        out.store(function(right, left) if swapped else function(left, right))

    return step


BINDERS: dict[Op, Binder] = {Op.UNARY: _unary, Op.GLU: _glu}
