"""Rules of ops that work element by element or row by row."""

from __future__ import annotations

import math

from app.engine.ggml import GGMLType, GluOp, UnaryOp
from app.engine.ggml import Op as O
from app.engine.opcheck.node import FLOATS, STORABLE, NodeCheck

F32, F16, BF16, I32 = GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.I32

#: (s0, s1, result) of ADD, SUB, MUL and DIV.
BINARY_TYPES = frozenset(
    {
        (F32, F32, F32),
        (F16, F16, F16),
        (BF16, BF16, BF16),
        (F16, F32, F16),
        (F16, F32, F32),
        (BF16, F32, BF16),
        (BF16, F32, F32),
    }
)


def binary(n: NodeCheck) -> None:
    n.takes(2)
    a, b = n.src(0), n.src(1)
    types = (a.type, b.type, n.tensor.type)
    adds_to_quantized = (
        n.tensor.op is O.ADD and a.type in STORABLE - FLOATS and types == (a.type, F32, a.type) and a.ne == b.ne
    )
    n.require(
        types in BINARY_TYPES or adds_to_quantized, f"it does not combine {'/'.join(type_.name for type_ in types)}"
    )
    n.shape_is(n.tensor, a.ne, "the result")
    n.repeats_into(b, a, "source 1")
    n.packed(a, "source 0")
    n.packed(n.tensor, "the result")


def same_shape_f32(n: NodeCheck) -> None:
    """One float32 source with packed rows, a result like it."""
    n.takes(1)
    n.all_f32(n.src(0), n.tensor)
    n.shape_is(n.tensor, n.src(0).ne, "the result")
    n.packed(n.src(0), "source 0")
    n.packed(n.tensor, "the result")


def scale(n: NodeCheck) -> None:
    same_shape_f32(n)
    n.contiguous(n.src(0), "source 0", free_dims=1)
    n.contiguous(n.tensor, "the result", free_dims=1)


def add_id(n: NodeCheck) -> None:
    n.takes(3)
    a, table, ids = n.src(0), n.src(1), n.src(2)
    n.all_f32(a, table, n.tensor)
    n.type_in(ids, (I32,), "the ids")
    n.shape_is(n.tensor, a.ne, "the result")
    n.shape_is(table, (a.ne[0], table.ne[1], 1, 1), "the table")
    n.shape_is(ids, (a.ne[1], a.ne[2], 1, 1), "the ids")
    n.require(a.ne[3] == 1, "source 0 has four dimensions")
    for tensor, what in ((a, "source 0"), (table, "the table"), (n.tensor, "the result")):
        n.packed(tensor, what)


def add1(n: NodeCheck) -> None:
    n.takes(2)
    n.all_f32(n.src(0), n.src(1), n.tensor)
    n.shape_is(n.tensor, n.src(0).ne, "the result")
    n.require(n.src(1).n_elements == 1, f"source 1 has {n.src(1).n_elements} elements, it should have one")
    n.packed(n.src(0), "source 0")
    n.packed(n.tensor, "the result")


def window(n: NodeCheck) -> None:
    """ACC and SET: a strided window of the result, given by the parameters."""
    n.takes(2)
    a, b = n.src(0), n.src(1)
    n.all_f32(a, b, n.tensor)
    n.shape_is(n.tensor, a.ne, "the result")
    n.contiguous(a, "source 0")
    n.contiguous(n.tensor, "the result")
    nb = [n.param(i) for i in range(3)]
    offset = n.param(3)
    n.require(min(*nb, offset) >= 0, "the window has a negative stride or offset")
    n.require(all(value % 4 == 0 for value in (*nb, offset)), "the window does not stand on whole elements")
    if b.n_elements:
        end = offset + 4 * b.ne[0] + sum((count - 1) * stride for count, stride in zip(b.ne[1:], nb, strict=True))
        n.require(end <= a.n_bytes, f"the window ends at byte {end} of {a.n_bytes}")


def fill(n: NodeCheck) -> None:
    n.takes(1)
    n.type_in(n.tensor, FLOATS, "the result")
    n.shape_is(n.tensor, n.src(0).ne, "the result")
    n.packed(n.tensor, "the result")


def total(n: NodeCheck) -> None:
    n.takes(1)
    n.packed(n.src(0), "source 0")
    n.fresh_f32((1, 1, 1, 1))
    n.all_f32(n.src(0))


def row_reduction(n: NodeCheck) -> None:
    n.takes(1)
    a = n.src(0)
    n.all_f32(a)
    n.packed(a, "source 0")
    n.fresh_f32((1, *a.ne[1:]))


def cumsum(n: NodeCheck) -> None:
    n.takes(1)
    n.all_f32(n.src(0))
    n.packed(n.src(0), "source 0")
    n.fresh_f32(n.src(0).ne)


def argmax(n: NodeCheck) -> None:
    n.takes(1)
    a = n.src(0)
    n.all_f32(a)
    n.packed(a, "source 0")
    n.require(a.ne[2] == a.ne[3] == 1, "source 0 is not a matrix")
    n.type_in(n.tensor, (I32,), "the result")
    n.shape_is(n.tensor, (a.ne[1], 1, 1, 1), "the result")
    n.contiguous(n.tensor, "the result")


def norm(n: NodeCheck) -> None:
    same_shape_f32(n)
    n.require(n.param_f32(0) >= 0, f"its epsilon is {n.param_f32(0)}")


def group_norm(n: NodeCheck) -> None:
    same_shape_f32(n)
    n.contiguous(n.src(0), "source 0")
    n.contiguous(n.tensor, "the result")
    n.require(n.param(0) > 0, f"{n.param(0)} groups make no sense")
    n.require(n.param_f32(1) >= 0, f"its epsilon is {n.param_f32(1)}")


def unary(n: NodeCheck) -> None:
    n.takes(1)
    n.type_in(n.src(0), FLOATS, "source 0")
    n.type_in(n.tensor, (n.src(0).type,), "the result")
    n.shape_is(n.tensor, n.src(0).ne, "the result")
    n.packed(n.src(0), "source 0")
    n.packed(n.tensor, "the result")
    n.require(n.param(0) in set(UnaryOp), f"{n.param(0)} is no unary function")


def glu(n: NodeCheck) -> None:
    n.takes(1, optional=(1,))
    a, b, out = n.src(0), n.optional(1), n.tensor
    n.require(n.param(0) in set(GluOp), f"{n.param(0)} is no gated unit")
    n.require(n.param(1) in {0, 1}, f"the parameter 'swapped' is {n.param(1)}")
    n.type_in(a, (F32, F16), "source 0")
    n.type_in(out, (a.type,), "the result")
    n.contiguous(a, "source 0", free_dims=1)
    n.contiguous(out, "the result", free_dims=1)
    if b is None:
        n.shape_is(a, (2 * out.ne[0], *out.ne[1:]), "source 0")
        return
    n.type_in(b, (a.type,), "source 1")
    n.contiguous(b, "source 1", free_dims=1)
    n.shape_is(b, a.ne, "source 1")
    n.shape_is(out, a.ne, "the result")


def soft_max(n: NodeCheck) -> None:
    n.takes(1, optional=(1, 2))
    a, mask, sinks = n.src(0), n.optional(1), n.optional(2)
    n.all_f32(a)
    n.contiguous(a, "source 0")
    n.fresh_f32(a.ne)
    if mask is not None:
        n.type_in(mask, (F16, F32), "the mask")
        n.contiguous(mask, "the mask")
        n.require(
            mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1], f"the mask {list(mask.ne)} does not fit {list(a.ne)}"
        )
        n.require(a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0, "the mask does not tile the heads")
    check_slopes_and_sinks(n, heads=a.ne[2], max_bias=n.param_f32(1), has_mask=mask is not None)
    if sinks is not None:
        n.all_f32(sinks)
        n.shape_is(sinks, (a.ne[2], 1, 1, 1), "the sinks")
        n.contiguous(sinks, "the sinks")


def check_slopes_and_sinks(n: NodeCheck, *, heads: int, max_bias: float, has_mask: bool) -> None:
    n.require(math.isfinite(max_bias) and max_bias >= 0, f"max_bias is {max_bias}")
    n.require(max_bias == 0 or has_mask, "a positional bias needs a mask")
    n.require(heads > 0, "there are no heads")


RULES = {
    **dict.fromkeys((O.ADD, O.SUB, O.MUL, O.DIV), binary),
    **dict.fromkeys((O.SQR, O.SQRT, O.LOG, O.SIN, O.COS, O.CLAMP, O.LEAKY_RELU), same_shape_f32),
    O.SCALE: scale,
    O.ADD_ID: add_id,
    O.ADD1: add1,
    **dict.fromkeys((O.ACC, O.SET), window),
    O.FILL: fill,
    O.SUM: total,
    **dict.fromkeys((O.SUM_ROWS, O.MEAN), row_reduction),
    O.CUMSUM: cumsum,
    O.ARGMAX: argmax,
    **dict.fromkeys((O.NORM, O.RMS_NORM, O.L2_NORM), norm),
    O.GROUP_NORM: group_norm,
    O.UNARY: unary,
    O.GLU: glu,
    O.SOFT_MAX: soft_max,
}
