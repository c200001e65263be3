"""Cases of ops that work element by element or row by row."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from app.engine.ggml import GGMLType, Op
from tests.contract.cases import BF16, F16, F32, I32, INF, NAN, CaseBuilder, Values, op_case

BINARY: dict[Op, Callable[[Values, Values], Values]] = {
    Op.ADD: lambda a, b: a + b,
    Op.SUB: lambda a, b: a - b,
    Op.MUL: lambda a, b: a * b,
    Op.DIV: lambda a, b: a / b,
}


def tiled(b: Values, shape: tuple[int, ...]) -> Values:
    """Repeat `b` into a shape: index modulo extent."""
    index = np.ix_(*(np.arange(n) % m for n, m in zip(shape, b.shape, strict=True)))
    return b[index]


@op_case("binary", *((op, a, b) for op in BINARY for a, b in (
    ((5, 4, 3, 2), (5, 4, 3, 2)),
    ((5, 4, 3, 2), (5, 1, 1, 1)),
    ((5, 4, 3, 2), (1, 4, 1, 2)),
    ((6, 4, 4, 3), (3, 2, 4, 1)),
)))  # fmt: skip
def binary(c: CaseBuilder, op: Op, a_ne: tuple[int, ...], b_ne: tuple[int, ...]) -> None:
    a, b = c.random(F32, *a_ne), c.leaf(F32, c.rng.uniform(0.5, 2, tuple(reversed(b_ne))))
    x = c.values(a)
    c.expect(c.node(op, F32, a_ne, (a, b)), BINARY[op](x, tiled(c.values(b), x.shape)))


@op_case(
    "binary-types",
    (F16, F16, F16),
    (BF16, BF16, BF16),
    (F16, F32, F16),
    (F16, F32, F32),
    (BF16, F32, BF16),
    (BF16, F32, F32),
)
def binary_types(c: CaseBuilder, a_type: GGMLType, b_type: GGMLType, out_type: GGMLType) -> None:
    a, b = c.random(a_type, 6, 4), c.random(b_type, 3, 2)
    x = c.values(a)
    c.expect(
        c.node(Op.MUL, out_type, (6, 4), (a, b)),
        x * tiled(c.values(b), x.shape),
        out_type.name.lower() if out_type is not F32 else "float",
    )


@op_case("add-to-quantized")
def add_to_quantized(c: CaseBuilder) -> None:
    a, b = c.random(GGMLType.Q8_0, 64, 3), c.leaf(F32, c.rng.uniform(-0.5, 0.5, (3, 64)))
    want = c.values(a) + c.values(b)
    out = c.node(Op.ADD, GGMLType.Q8_0, (64, 3), (a, b))
    c.expect(out, want, "bf16")  # 8 bits remain


@op_case("add-expert-slices")
def add_expert_slices(c: CaseBuilder) -> None:
    """Slices [n, tokens] of [n, used, tokens], one row apart."""
    x = c.random(F32, 5, 3, 4)
    one, two = (c.view(x, (5, 4), (4, x.nb[2], 4 * x.nb[2], 4 * x.nb[2]), i * x.nb[1]) for i in (0, 2))
    c.expect(c.node(Op.ADD, F32, (5, 4), (one, two)), c.values(one) + c.values(two))


@op_case("mul-in-place")
def mul_in_place(c: CaseBuilder) -> None:
    a, b = c.random(F32, 6, 4), c.random(F32, 3, 1)
    x = c.values(a)
    c.expect(c.node(Op.MUL, F32, (6, 4), (a, b), alias=a), x * tiled(c.values(b), x.shape))


@op_case("add1")
def add1(c: CaseBuilder) -> None:
    a, b = c.random(F32, 5, 3), c.random(F32, 1)
    c.expect(c.node(Op.ADD1, F32, (5, 3), (a, b)), c.values(a) + c.values(b))


@op_case("add-id")
def add_id(c: CaseBuilder) -> None:
    """Expert biases; the ids are the first columns of a wider matrix."""
    a, table = c.random(F32, 5, 2, 3), c.random(F32, 5, 4)
    wide = c.leaf(I32, np.array([[3, 0, 9, 9], [1, 1, 9, 9], [2, 3, 9, 9]]))
    ids = c.view(wide, (2, 3), (4, 16, 48, 48))
    want = c.values(a).copy()
    for t in range(3):
        for j in range(2):
            want[0, t, j] += c.values(table)[0, 0, c.values(ids)[0, 0, t, j]]
    c.expect(c.node(Op.ADD_ID, F32, (5, 2, 3), (a, table, ids)), want)


@op_case("window", (Op.ACC, False), (Op.ACC, True), (Op.SET, False))
def window(c: CaseBuilder, op: Op, in_place: bool) -> None:
    """A [3, 2] window of a [5, 4] matrix, from column 1 of row 1 on."""
    a, b = c.random(F32, 5, 4), c.random(F32, 3, 2)
    want = c.values(a).copy()
    part = want[0, 0, 1:3, 1:4]
    part[:] = c.values(b)[0, 0] + (part if op is Op.ACC else 0)
    out = c.node(op, F32, (5, 4), (a, b), (20, 80, 80, 24, int(in_place)), alias=a if in_place else None)
    c.expect(out, want)


@op_case("scale", (1.5, 0.0), (0.0, 0.0), (-2.0, 0.25))
def scale(c: CaseBuilder, factor: float, bias: float) -> None:
    a = c.random(F32, 7, 3, 2)
    c.expect(c.node(Op.SCALE, F32, (7, 3, 2), (a,), (factor, bias)), c.values(a) * factor + bias)


@op_case("scale-view-in-place")
def scale_view_in_place(c: CaseBuilder) -> None:
    """Clearing one slot of a state cache; the other slots stay."""
    cache = c.random(F32, 8, 4)
    slot = c.view(cache, (8, 1), (4, 32, 32, 32), 2 * 32)
    want = c.values(cache).copy()
    want[0, 0, 2] = 0
    c.node(Op.SCALE, F32, (8, 1), (slot,), (0.0, 0.0), alias=slot)
    c.expect(cache, want, "exact")


@op_case("clamp", (-0.5, 0.5), (2.0**-14, INF), (-INF, 0.0))
def clamp(c: CaseBuilder, low: float, high: float) -> None:
    a = c.random(F32, 9, 2)
    c.expect(c.node(Op.CLAMP, F32, (9, 2), (a,), (low, high)), np.clip(c.values(a), low, high), "exact")


@op_case("map", *((op,) for op in (Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS)))
def map_(c: CaseBuilder, op: Op) -> None:
    functions = {Op.SQR: np.square, Op.SQRT: np.sqrt, Op.LOG: np.log, Op.SIN: np.sin, Op.COS: np.cos}
    a = c.leaf(F32, c.rng.uniform(0.1, 5, (2, 3, 11)))
    c.expect(c.node(op, F32, a.ne, (a,)), functions[op](c.values(a)))


@op_case("leaky-relu")
def leaky_relu(c: CaseBuilder) -> None:
    a = c.random(F32, 9, 2)
    x = c.values(a)
    c.expect(c.node(Op.LEAKY_RELU, F32, (9, 2), (a,), (0.125,)), np.where(x > 0, x, 0.125 * x))


@op_case("fill", (-INF,), (1.5,))
def fill(c: CaseBuilder, value: float) -> None:
    a = c.leaf(F32, np.full((2, 5), NAN))
    c.expect(c.node(Op.FILL, F32, (5, 2), (a,), (value,)), np.full((2, 5), value), "exact")


def _norm(op: Op, x: Values, eps: float) -> Values:
    if op is Op.RMS_NORM:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    if op is Op.L2_NORM:
        return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), eps)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)


@op_case("norm", *((op, eps) for op in (Op.NORM, Op.RMS_NORM, Op.L2_NORM) for eps in (1e-5, 0.5)))
def norm(c: CaseBuilder, op: Op, eps: float) -> None:
    a = c.random(F32, 33, 3, 2)
    c.expect(c.node(op, F32, a.ne, (a,), (eps,)), _norm(op, c.values(a), float(np.float32(eps))))


@op_case("norm-strided", (Op.NORM,), (Op.RMS_NORM,), (Op.L2_NORM,))
def norm_strided(c: CaseBuilder, op: Op) -> None:
    """The key heads inside a fused projection."""
    fused = c.random(F32, 40, 3)
    keys = c.view(fused, (8, 2, 3), (4, 32, 160, 480), 64)
    c.expect(c.node(op, F32, (8, 2, 3), (keys,), (1e-6,)), _norm(op, c.values(keys), 1e-6))


@op_case("norm-in-place")
def norm_in_place(c: CaseBuilder) -> None:
    a = c.random(F32, 16, 3)
    c.expect(c.node(Op.RMS_NORM, F32, (16, 3), (a,), (1e-5,), alias=a), _norm(Op.RMS_NORM, c.values(a), 1e-5))


@op_case("norm-large-mean")
def norm_large_mean(c: CaseBuilder) -> None:
    """The variance must not drown in the mean."""
    a = c.leaf(F32, 1000 + c.rng.standard_normal((2, 64)))
    c.expect(c.node(Op.NORM, F32, (64, 2), (a,), (1e-5,)), _norm(Op.NORM, c.values(a), 1e-5), "f16")


@op_case("group-norm", (2,), (3,))
def group_norm(c: CaseBuilder, groups: int) -> None:
    a = c.random(F32, 4, 3, 5, 2)
    x, want = c.values(a), np.empty((2, 5, 3, 4))
    size = math.ceil(5 / groups)
    for b in range(2):
        for first in range(0, 5, size):
            part = x[b, first : first + size]
            want[b, first : first + size] = (part - part.mean()) / math.sqrt(part.var() + 1e-5)
    c.expect(c.node(Op.GROUP_NORM, F32, a.ne, (a,), (groups, 1e-5)), want)


@op_case("sum")
def sum_(c: CaseBuilder) -> None:
    a = c.random(F32, 17, 5, 2)
    c.expect(c.node(Op.SUM, F32, (1,), (a,)), c.values(a).sum(), "float")


@op_case("rows", (Op.SUM_ROWS,), (Op.MEAN,), (Op.CUMSUM,))
def rows(c: CaseBuilder, op: Op) -> None:
    a = c.leaf(F32, c.rng.uniform(0, 1, (2, 3, 4, 21)))
    x = c.values(a)
    want = {
        Op.SUM_ROWS: x.sum(-1, keepdims=True),
        Op.MEAN: x.mean(-1, keepdims=True),
        Op.CUMSUM: np.add.accumulate(x, axis=-1),
    }[op]
    c.expect(c.node(op, F32, tuple(reversed(want.shape)), (a,)), want)


@op_case("argmax")
def argmax(c: CaseBuilder) -> None:
    a = c.leaf(F32, np.array([[1.0, 7, 3, 7, 2], [-5, -4, -3, -2, -1]]))
    c.expect(c.node(Op.ARGMAX, I32, (2,), (a,)), np.array([1, 4]), "exact")
