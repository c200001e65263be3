"""Rules of ops that move, select, sort or lay out elements."""

from __future__ import annotations

import math

from app.engine.ggml import TRAITS, GGMLType
from app.engine.ggml import Op as O
from app.engine.opcheck.node import FLOATS, INTERNAL, QUANTIZED, STORABLE, WEIGHTS, NodeCheck, is_same_place

F32, F16, I32, I64 = GGMLType.F32, GGMLType.F16, GGMLType.I32, GGMLType.I64


def can_convert(source: GGMLType, target: GGMLType) -> bool:
    """Conversions of CPY, CONT and DUP: alike; floats mutually; F32 <-> I32; to and from quantized."""
    if source == target:
        return source not in INTERNAL
    if source in FLOATS and target in FLOATS:
        return True
    if {source, target} == {F32, I32}:
        return True
    return source in FLOATS and target in STORABLE or source in QUANTIZED and target in FLOATS


def _conversion(n: NodeCheck) -> None:
    a, out = n.src(0), n.tensor
    n.require(can_convert(a.type, out.type), f"{a.type.name} does not convert to {out.type.name}")
    n.require(
        a.n_elements == out.n_elements, f"{a.n_elements} elements do not fill {out.n_elements}, shape {list(out.ne)}"
    )
    if {a.type, out.type} & QUANTIZED:
        n.packed(a, "source 0")
        if a.ne != out.ne:  # blocks may not be cut by another folding
            n.contiguous(a, "source 0")
            n.contiguous(out, "the result")


def cpy(n: NodeCheck) -> None:
    n.takes(2)
    n.require(is_same_place(n.src(1), n.tensor), "the result is not its destination (source 1)")
    _conversion(n)


def dup(n: NodeCheck) -> None:
    n.takes(1)
    n.type_in(n.tensor, (n.src(0).type,), "the result")
    n.contiguous(n.tensor, "the result")
    _conversion(n)


def plain_type(n: NodeCheck, what: str) -> None:
    if TRAITS[n.src(0).type].block_elements != 1:
        n.refuse(f"{what} is {n.src(0).type.name}, quantized types are not moved element by element")
    n.type_in(n.tensor, (n.src(0).type,), "the result")


def repeat(n: NodeCheck) -> None:
    n.takes(1)
    plain_type(n, "source 0")
    n.repeats_into(n.src(0), n.tensor, "source 0")
    n.contiguous(n.tensor, "the result")


def concat(n: NodeCheck) -> None:
    n.takes(2)
    a, b, dim = n.src(0), n.src(1), n.param(0)
    plain_type(n, "source 0")
    n.type_in(b, (a.type,), "source 1")
    n.require(0 <= dim < 4, f"there is no dimension {dim}")
    joined = list(a.ne)
    joined[dim] += b.ne[dim]
    others = list(b.ne)
    others[dim] = a.ne[dim]
    n.require(tuple(others) == a.ne, f"shapes {list(a.ne)} and {list(b.ne)} do not join along dimension {dim}")
    n.shape_is(n.tensor, joined, "the result")
    n.contiguous(n.tensor, "the result")


def pad(n: NodeCheck) -> None:
    n.takes(1)
    a = n.src(0)
    n.all_f32(a)
    widths = [n.param(i) for i in range(8)]
    n.require(min(widths) >= 0, "a padding is negative")
    n.require(n.param(8) in {0, 1}, f"the parameter 'circular' is {n.param(8)}")
    n.fresh_f32(ne + widths[2 * i] + widths[2 * i + 1] for i, ne in enumerate(a.ne))


def arange(n: NodeCheck) -> None:
    n.takes(0)
    start, stop, step = (n.param_f32(i) for i in range(3))
    n.require(all(map(math.isfinite, (start, stop, step))) and step != 0, "start, stop or step makes no sense")
    count = math.ceil((stop - start) / step)
    n.fresh_f32((count, 1, 1, 1))


def diag(n: NodeCheck) -> None:
    n.takes(1)
    a = n.src(0)
    n.all_f32(a)
    n.require(a.ne[1] == 1, "source 0 has more than one row")
    n.packed(a, "source 0")
    n.fresh_f32((a.ne[0], a.ne[0], a.ne[2], a.ne[3]))


def tri(n: NodeCheck) -> None:
    n.takes(1)
    n.all_f32(n.src(0))
    n.packed(n.src(0), "source 0")
    n.fresh_f32(n.src(0).ne)
    n.require(0 <= n.param(0) < 4, f"{n.param(0)} is no triangle")


def solve_tri(n: NodeCheck) -> None:
    n.takes(2)
    a, b = n.src(0), n.src(1)
    n.all_f32(a, b)
    n.require(a.ne[0] == a.ne[1], f"the matrix {list(a.ne)} is not square")
    n.require(a.ne[1:] == b.ne[1:], f"the right side {list(b.ne)} does not fit the matrix {list(a.ne)}")
    n.contiguous(a, "source 0")
    n.contiguous(b, "source 1")
    n.fresh_f32(b.ne)


def get_rows(n: NodeCheck) -> None:
    n.takes(2)
    table, ids, out = n.src(0), n.src(1), n.tensor
    n.type_in(table, WEIGHTS | {I32}, "the table")
    n.type_in(ids, (I32,), "the ids")
    n.packed(table, "the table")
    n.require(ids.ne[3] == 1, "the ids have four dimensions")
    n.require(
        table.ne[2:] == ids.ne[1:3],
        f"the ids {list(ids.ne)} do not fit the table {list(table.ne)} in the outer dimensions",
    )
    n.type_in(out, (I32,) if table.type is I32 else (F32,), "the result")
    n.shape_is(out, (table.ne[0], *ids.ne[:3]), "the result")
    n.contiguous(out, "the result")


def set_rows(n: NodeCheck) -> None:
    n.takes(3)
    data, ids, out = n.src(0), n.src(1), n.tensor
    n.require(is_same_place(n.src(2), out), "the result is not its destination (source 2)")
    n.type_in(data, (F32, F16), "the data")
    n.type_in(ids, (I64, I32), "the ids")
    n.type_in(out, STORABLE, "the destination")
    n.require(data.type is F32 or out.type is F16, f"F16 rows do not go into {out.type.name}")
    n.packed(data, "the data")
    n.packed(out, "the destination")
    n.require(
        data.ne[0] == out.ne[0] and data.ne[2:] == out.ne[2:],
        f"data of shape {list(data.ne)} does not fit the destination {list(out.ne)}",
    )
    n.require(ids.ne[3] == 1 and ids.ne[0] == data.ne[1], f"{list(ids.ne)} ids for {data.ne[1]} rows")
    n.require(data.ne[2] % ids.ne[1] == 0 and data.ne[3] % ids.ne[2] == 0, "the ids do not tile the outer dimensions")


def argsort(n: NodeCheck) -> None:
    n.takes(1)
    n.all_f32(n.src(0))
    n.packed(n.src(0), "source 0")
    n.type_in(n.tensor, (I32,), "the result")
    n.shape_is(n.tensor, n.src(0).ne, "the result")
    n.contiguous(n.tensor, "the result")
    n.require(n.param(0) in {0, 1}, f"{n.param(0)} is no sort order")


def top_k(n: NodeCheck) -> None:
    n.takes(1)
    a = n.src(0)
    n.all_f32(a)
    n.packed(a, "source 0")
    n.type_in(n.tensor, (I32,), "the result")
    n.require(n.tensor.ne[0] <= a.ne[0] and n.tensor.ne[1:] == a.ne[1:], f"{list(n.tensor.ne)} of {list(a.ne)}")
    n.contiguous(n.tensor, "the result")


RULES = {
    O.CPY: cpy,
    **dict.fromkeys((O.DUP, O.CONT), dup),
    O.REPEAT: repeat,
    O.CONCAT: concat,
    O.PAD: pad,
    O.ARANGE: arange,
    O.DIAG: diag,
    O.TRI: tri,
    O.SOLVE_TRI: solve_tri,
    O.GET_ROWS: get_rows,
    O.SET_ROWS: set_rows,
    O.ARGSORT: argsort,
    O.TOP_K: top_k,
}
