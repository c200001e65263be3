"""Cases of functions of one value and of gated units."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from app.engine.ggml import GGMLType, GluOp, Op, UnaryOp
from tests.contract.cases import BF16, F16, F32, CaseBuilder, Values, op_case


def _xielu(x: float) -> float:
    alpha_n, alpha_p, beta, eps = 0.8, 0.7, 0.5, -1e-6
    if x > 0:
        return alpha_p * x * x + beta * x
    return (math.expm1(min(x, eps)) - x) * alpha_n + beta * x


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)))


def _gelu_erf(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


UNARY: dict[UnaryOp, Callable[[float], float]] = {
    UnaryOp.ABS: abs,
    UnaryOp.SGN: lambda x: (x > 0) - (x < 0),
    UnaryOp.NEG: lambda x: -x,
    UnaryOp.STEP: lambda x: float(x > 0),
    UnaryOp.TANH: math.tanh,
    UnaryOp.ELU: lambda x: x if x > 0 else math.expm1(x),
    UnaryOp.RELU: lambda x: max(x, 0),
    UnaryOp.SIGMOID: _sigmoid,
    UnaryOp.GELU: _gelu,
    UnaryOp.GELU_QUICK: lambda x: x * _sigmoid(1.702 * x),
    UnaryOp.SILU: lambda x: x * _sigmoid(x),
    UnaryOp.HARDSWISH: lambda x: x * min(1, max(0, (x + 3) / 6)),
    UnaryOp.HARDSIGMOID: lambda x: min(1, max(0, (x + 3) / 6)),
    UnaryOp.EXP: math.exp,
    UnaryOp.EXPM1: math.expm1,
    UnaryOp.SOFTPLUS: lambda x: x if x > 20 else math.log1p(math.exp(x)),
    UnaryOp.GELU_ERF: _gelu_erf,
    UnaryOp.XIELU: _xielu,
    UnaryOp.FLOOR: math.floor,
    UnaryOp.CEIL: math.ceil,
    UnaryOp.ROUND: lambda x: math.copysign(math.floor(abs(x) + 0.5), x),
    UnaryOp.TRUNC: math.trunc,
}
UNARY_INPUTS = (
    -40.0,
    -9.5,
    -3.0,
    -2.5,
    -1.0,
    -0.5,
    -0.25,
    0.0,
    0.25,
    0.49999997,
    0.5,
    1.0,
    1.5,
    2.5,
    3.0,
    9.5,
    19.0,
    25.0,
)


def _params(op: UnaryOp) -> tuple[int | float, ...]:
    return (op, 0.8, 0.7, 0.5, -1e-6) if op is UnaryOp.XIELU else (op,)


@op_case("unary", *((op,) for op in UnaryOp))
def unary(c: CaseBuilder, op: UnaryOp) -> None:
    a = c.leaf(F32, np.array([UNARY_INPUTS, UNARY_INPUTS[::-1]]))
    want = np.vectorize(UNARY[op], otypes=[np.float64])(c.values(a))
    c.expect(c.node(Op.UNARY, F32, a.ne, (a,), _params(op)), want)


@op_case("unary-large", (UnaryOp.SIGMOID,), (UnaryOp.SILU,), (UnaryOp.TANH,), (UnaryOp.SOFTPLUS,), (UnaryOp.GELU,))
def unary_large(c: CaseBuilder, op: UnaryOp) -> None:
    """No overflow on the way: far out they are 0, 1 or x."""
    a = c.leaf(F32, np.array([-500.0, 500.0]))
    wants = {UnaryOp.SIGMOID: (0, 1), UnaryOp.TANH: (-1, 1)}
    c.expect(c.node(Op.UNARY, F32, (2,), (a,), (op,)), np.array(wants.get(op, (0, 500))), "float")


@op_case("unary-strided")
def unary_strided(c: CaseBuilder) -> None:
    """The gate half of a fused projection [q | gate] per head."""
    fused = c.random(F32, 8, 3, 2)
    gate = c.view(fused, (4, 3, 2), fused.nb, 16)
    want = np.vectorize(_sigmoid)(c.values(gate))
    c.expect(c.node(Op.UNARY, F32, (4, 3, 2), (gate,), (UnaryOp.SIGMOID,)), want)


@op_case("unary-16-bit", (F16,), (BF16,))
def unary_16_bit(c: CaseBuilder, type_: GGMLType) -> None:
    a = c.random(type_, 12, 2)
    want = np.vectorize(UNARY[UnaryOp.SILU])(c.values(a))
    c.expect(c.node(Op.UNARY, type_, (12, 2), (a,), (UnaryOp.SILU,)), want, type_.name.lower())


def _glu(op: GluOp, a: Values, b: Values) -> Values:
    alpha, limit = 1.702, 1.25
    gates = {
        GluOp.REGLU: UnaryOp.RELU,
        GluOp.GEGLU: UnaryOp.GELU,
        GluOp.SWIGLU: UnaryOp.SILU,
        GluOp.GEGLU_ERF: UnaryOp.GELU_ERF,
        GluOp.GEGLU_QUICK: UnaryOp.GELU_QUICK,
    }
    if op in gates:
        return np.vectorize(UNARY[gates[op]], otypes=[np.float64])(a) * b
    x, y = np.minimum(a, limit), np.clip(b, -limit, limit)
    if op is GluOp.SWIGLU_OAI:
        return x / (1 + np.exp(-alpha * x)) * (y + 1)
    return x / (1 + np.exp(-x)) * y


@op_case("glu", *((op, layout) for op in GluOp for layout in ("two", "one", "swapped", "halves")))
def glu(c: CaseBuilder, op: GluOp, layout: str) -> None:
    """Two sources; one of twice the width, plain and swapped; two row-strided halves of one."""
    fused = c.random(F32, 12, 3, 2)
    x = c.values(fused)
    left, right = x[..., :6], x[..., 6:]
    params = (op, int(layout == "swapped"), 1.702, 1.25)
    if layout in ("one", "swapped"):
        out = c.node(Op.GLU, F32, (6, 3, 2), (fused,), params)
        c.expect(out, _glu(op, left, right) if layout == "one" else _glu(op, right, left))
        return
    if layout == "two":
        a, b = c.leaf(F32, left), c.leaf(F32, right)
        a, b = c.reshape(a, 6, 3, 2), c.reshape(b, 6, 3, 2)
    else:
        a, b = (c.view(fused, (6, 3, 2), fused.nb, offset) for offset in (0, 24))
    c.expect(c.node(Op.GLU, F32, (6, 3, 2), (a, b), params), _glu(op, left, right))


@op_case("glu-f16")
def glu_f16(c: CaseBuilder) -> None:
    a, b = c.random(F16, 8, 3), c.random(F16, 8, 3)
    c.expect(c.node(Op.GLU, F16, (8, 3), (a, b), (GluOp.SWIGLU,)), _glu(GluOp.SWIGLU, c.values(a), c.values(b)), "f16")
