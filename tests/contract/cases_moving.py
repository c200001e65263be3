"""Cases of ops that move, select, sort or lay out elements."""

from __future__ import annotations

import numpy as np

from app.engine.ggml import GGMLType, Op
from tests.contract.cases import BF16, F16, F32, I32, I64, CaseBuilder, Values, bf16_bits, op_case

Q8_0, Q4_0 = GGMLType.Q8_0, GGMLType.Q4_0


@op_case("cpy", *((a, b) for a in (F32, F16, BF16) for b in (F32, F16, BF16)))
def cpy(c: CaseBuilder, a_type: GGMLType, b_type: GGMLType) -> None:
    """Between floats; narrowing rounds ties to even."""
    ties = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, -0.0, 60000, 2**-24, 3.0e-7])
    a, target = c.leaf(a_type, np.stack([ties, -ties])), c.leaf(b_type, np.zeros((2, 8)))
    x = c.values(a)
    want = {
        F32: x,
        F16: x.astype(np.float32).astype(np.float16).astype(np.float64),
        BF16: (bf16_bits(x).astype(np.uint32) << 16).view(np.float32),
    }[b_type]
    c.expect(c.node(Op.CPY, b_type, (8, 2), (a, target), alias=target), want, "exact")


@op_case("cpy-fold")
def cpy_fold(c: CaseBuilder) -> None:
    """Strided columns of a convolution's input into the rows of a state cache: other shapes, logical order."""
    x = c.random(F32, 7, 5, 2)
    tail = c.view(x, (3, 5, 2), x.nb, 4 * 4)
    cache = c.random(F32, 15, 4)
    rows = c.view(cache, (15, 2), (4, 60, 120, 120), 60)
    want = c.values(cache).copy()
    want[0, 0, 1:3] = c.values(tail).reshape(2, 15)
    c.node(Op.CPY, F32, (15, 2), (tail, rows), alias=rows)
    c.expect(cache, want, "exact")


@op_case("cpy-to-strided")
def cpy_to_strided(c: CaseBuilder) -> None:
    a, target = c.random(F32, 3, 4), c.random(F32, 6, 4)
    part = c.view(target, (3, 4), (4, 24, 96, 96), 8)
    want = c.values(target).copy()
    want[0, 0, :, 2:5] = c.values(a)[0, 0]
    c.node(Op.CPY, F32, (3, 4), (a, part), alias=part)
    c.expect(part, c.values(a), "exact")


@op_case("cast")
def cast(c: CaseBuilder) -> None:
    """A copy whose destination is itself: a cycle of one in the graph."""
    a = c.random(F32, 6, 3)
    out = c.node(Op.CPY, F16, (6, 3), (a,))
    out.src = (a, out)
    c.expect(out, c.values(a).astype(np.float32).astype(np.float16).astype(np.float64), "exact")


@op_case("cpy-quantized", (Q8_0, "bf16"), (Q4_0, "coarse"))
def cpy_quantized(c: CaseBuilder, type_: GGMLType, _: str) -> None:
    """To blocks and back: off by at most half a step of each block."""
    a, target = (
        c.random(F32, 64, 3),
        c.raw_leaf(type_, (64, 3), np.zeros((3, 64 // 32 * (34 if type_ is Q8_0 else 18)), np.uint8)),
    )
    packed = c.node(Op.CPY, type_, (64, 3), (a, target), alias=target)
    out = c.node(Op.CPY, F32, (64, 3), (packed,))
    out.src = (packed, out)
    x = c.values(a)
    step = np.abs(x.reshape(3, 2, 32)).max(-1) / (127 if type_ is Q8_0 else 8)
    difference = c.node(Op.SUB, F32, (64, 3), (out, a))
    scaled = c.node(Op.DIV, F32, (64, 3), (difference, c.leaf(F32, np.repeat(step, 32, axis=-1))))
    clipped = c.node(Op.CLAMP, F32, (64, 3), (scaled,), (-1.01, 1.01))
    leftover = c.node(Op.SUB, F32, (64, 3), (scaled, clipped))
    c.expect(leftover, np.zeros((3, 64)), "exact")


@op_case("cpy-quantized-bytes")
def cpy_quantized_bytes(c: CaseBuilder) -> None:
    a, target = c.random(Q8_0, 64, 3), c.random(Q8_0, 64, 3)
    c.expect(c.node(Op.CPY, Q8_0, (64, 3), (a, target), alias=target), c.values(a), "exact")


@op_case("cpy-integers", (F32, I32), (I32, F32), (I32, I32), (I64, I64))
def cpy_integers(c: CaseBuilder, a_type: GGMLType, b_type: GGMLType) -> None:
    """Floats to integers truncate."""
    values = np.array([[-2.9, -1.0, 0.5, 7.99]]) if a_type is F32 else np.array([[-3, 0, 5, 2**20]])
    a, target = c.leaf(a_type, values), c.leaf(b_type, np.zeros((1, 4)))
    c.expect(c.node(Op.CPY, b_type, (4,), (a, target), alias=target), np.trunc(values), "exact")


@op_case("cont", (F32,), (F16,), (I32,))
def cont(c: CaseBuilder, type_: GGMLType) -> None:
    a = c.leaf(type_, c.rng.integers(-50, 50, (2, 3, 4, 5)))
    turned = c.permute(a, 1, 2, 0, 3)
    c.expect(c.node(Op.CONT, type_, turned.ne, (turned,)), c.values(turned), "exact")


@op_case("cont-fold")
def cont_fold(c: CaseBuilder) -> None:
    """CONT may fold its result into another shape."""
    a = c.random(F32, 5, 4, 3)
    turned = c.permute(a, 0, 2, 1, 3)
    c.expect(c.node(Op.CONT, F32, (15, 4), (turned,)), c.values(turned).reshape(4, 15), "exact")


@op_case("dup")
def dup(c: CaseBuilder) -> None:
    a = c.random(F32, 5, 4)
    c.expect(c.node(Op.DUP, F32, (5, 4), (a,)), c.values(a), "exact")


@op_case("repeat", ((3, 2, 1, 1), (6, 2, 3, 2)), ((1, 4, 1, 1), (5, 4, 1, 1)), ((2, 3, 2, 1), (4, 6, 4, 3)))
def repeat(c: CaseBuilder, small: tuple[int, ...], large: tuple[int, ...]) -> None:
    a = c.random(F32, *small)
    times = [m // n for n, m in zip(reversed(small), reversed(large), strict=True)]
    c.expect(c.node(Op.REPEAT, F32, large, (a,)), np.tile(c.values(a), times), "exact")


@op_case("repeat-each")
def repeat_each(c: CaseBuilder) -> None:
    """Each head several times, by a dimension of extent 1 in between."""
    a = c.random(F32, 4, 1, 3)
    c.expect(c.node(Op.REPEAT, F32, (4, 2, 3), (a,)), np.repeat(c.values(a), 2, axis=2), "exact")


@op_case("concat", *((dim, type_) for dim in range(4) for type_ in (F32, I32)))
def concat(c: CaseBuilder, dim: int, type_: GGMLType) -> None:
    ne = [3, 4, 2, 2]
    other = [n + 1 if i == dim else n for i, n in enumerate(ne)]
    a = c.leaf(type_, c.rng.integers(-9, 9, tuple(reversed(ne))))
    b = c.leaf(type_, c.rng.integers(-9, 9, tuple(reversed(other))))
    joined = [n + m if i == dim else n for i, (n, m) in enumerate(zip(ne, other, strict=True))]
    want = np.concatenate([c.values(a), c.values(b)], axis=3 - dim)
    c.expect(c.node(Op.CONCAT, type_, joined, (a, b), (dim,)), want, "exact")


@op_case("concat-transposed")
def concat_transposed(c: CaseBuilder) -> None:
    """A convolution's input along time: the state's columns, then the new ones, which come transposed."""
    state, new = c.random(F32, 3, 5, 2), c.random(F32, 5, 4, 2)
    turned = c.permute(new, 1, 0, 2, 3)
    want = np.concatenate([c.values(state), c.values(turned)], axis=3)
    c.expect(c.node(Op.CONCAT, F32, (7, 5, 2), (state, turned), (0,)), want, "exact")


@op_case("concat-empty")
def concat_empty(c: CaseBuilder) -> None:
    a, none = c.random(F32, 3, 4), c.leaf(F32, np.zeros((4, 0)))
    c.expect(c.node(Op.CONCAT, F32, (3, 4), (a, none), (0,)), c.values(a), "exact")


@op_case("pad", (False,), (True,))
def pad(c: CaseBuilder, circular: bool) -> None:
    a = c.random(F32, 4, 3, 2)
    widths = (1, 2, 0, 3, 1, 0, 0, 0)
    want = np.pad(c.values(a), [(0, 0), (1, 0), (0, 3), (1, 2)], mode="wrap" if circular else "constant")
    c.expect(c.node(Op.PAD, F32, (7, 6, 3), (a,), (*widths, int(circular))), want, "exact")


@op_case("arange", (0.0, 5.0, 1.0), (1.0, 2.0, 0.3), (4.0, -4.0, -1.5))
def arange(c: CaseBuilder, start: float, stop: float, step: float) -> None:
    want = np.arange(start, stop, step)
    c.expect(c.node(Op.ARANGE, F32, (len(want),), (), (start, stop, step)), want)


@op_case("diag")
def diag(c: CaseBuilder) -> None:
    a = c.random(F32, 4, 1, 3, 2)
    want = np.zeros((2, 3, 4, 4))
    for i, j in np.ndindex(2, 3):
        want[i, j] = np.diag(c.values(a)[i, j, 0])
    c.expect(c.node(Op.DIAG, F32, (4, 4, 3, 2), (a,)), want, "exact")


@op_case("tri", (0,), (1,), (2,), (3,))
def tri(c: CaseBuilder, kind: int) -> None:
    """0: upper with the diagonal, 1: upper, 2: lower with the diagonal, 3: lower."""
    a = c.random(F32, 5, 4, 2)
    x = c.values(a)
    want = (np.triu(x), np.triu(x, 1), np.tril(x), np.tril(x, -1))[kind]
    c.expect(c.node(Op.TRI, F32, (5, 4, 2), (a,), (kind,)), want, "exact")


@op_case("solve-tri")
def solve_tri(c: CaseBuilder) -> None:
    """What stands above the diagonal is not part of the matrix."""
    lower = np.tril(c.rng.standard_normal((2, 2, 5, 5)), -1) * 0.5 + np.eye(5) * c.rng.uniform(1, 2, (2, 2, 5, 1))
    a, b = c.leaf(F32, lower + np.triu(np.full((5, 5), 7.0), 1)), c.random(F32, 3, 5, 2, 2)
    want = np.linalg.solve(np.tril(c.values(a)), c.values(b))
    c.expect(c.node(Op.SOLVE_TRI, F32, (3, 5, 2, 2), (a, b)), want)


def _picked(table: Values, ids: Values) -> Values:
    """table [d, c, rows, n], ids [1, d, c, r] -> [d, c, r, n]."""
    outer = np.ndindex(*table.shape[:2])
    want = np.empty((*table.shape[:2], ids.shape[-1], table.shape[-1]), table.dtype)
    for q, p in outer:
        for i in range(ids.shape[-1]):
            want[q, p, i] = table[q, p, ids[0, q, p, i]]
    return want


@op_case(
    "get-rows",
    (F32, 5),
    (F16, 5),
    (BF16, 5),
    (I32, 5),
    (Q8_0, 64),
    (Q4_0, 64),
    (GGMLType.Q4_K, 256),
    (GGMLType.Q6_K, 256),
)
def get_rows(c: CaseBuilder, type_: GGMLType, n: int) -> None:
    table = c.leaf(type_, c.rng.integers(-99, 99, (7, n))) if type_ is I32 else c.random(type_, n, 7)
    ids = c.leaf(I32, np.array([6, 0, 3, 3]))
    kind = "exact" if type_ in (F32, F16, BF16, I32) else "float"
    c.expect(
        c.node(Op.GET_ROWS, I32 if type_ is I32 else F32, (n, 4), (table, ids)),
        _picked(c.values(table), c.values(ids)),
        kind,
    )


@op_case("get-rows-4d")
def get_rows_4d(c: CaseBuilder) -> None:
    table = c.random(F32, 3, 5, 2, 3)
    ids = c.leaf(I32, c.rng.integers(0, 5, (3, 2, 4)))
    c.expect(c.node(Op.GET_ROWS, F32, (3, 4, 2, 3), (table, ids)), _picked(c.values(table), c.values(ids)), "exact")


@op_case("get-rows-router")
def get_rows_router(c: CaseBuilder) -> None:
    """Probabilities of the chosen experts: [1, experts, tokens] by a view of the sorted ids."""
    probabilities = c.random(F32, 1, 6, 3)
    order = c.leaf(I32, np.array([c.rng.permutation(6) for _ in range(3)]))
    ids = c.view(order, (2, 3), (4, 24, 72, 72))
    c.expect(
        c.node(Op.GET_ROWS, F32, (1, 2, 3), (probabilities, ids)),
        _picked(c.values(probabilities), c.values(ids)),
        "exact",
    )


@op_case("set-rows", *((type_, ids) for type_ in (F32, F16, BF16) for ids in (I32, I64)))
def set_rows(c: CaseBuilder, type_: GGMLType, ids_type: GGMLType) -> None:
    data, cache = c.random(F32, 4, 3), c.random(type_, 4, 8)
    ids = c.leaf(ids_type, np.array([6, 0, 3]))
    rounded = {
        F32: lambda x: x,
        F16: lambda x: x.astype(np.float16),
        BF16: lambda x: (bf16_bits(x).astype(np.uint32) << 16).view(np.float32),
    }[type_]
    want = c.values(cache).copy()
    for i, row in enumerate((6, 0, 3)):
        want[0, 0, row] = rounded(c.values(data)[0, 0, i].astype(np.float32))
    c.expect(c.node(Op.SET_ROWS, type_, (4, 8), (data, ids, cache), alias=cache), want, "exact")


@op_case(
    "set-rows-quantized", (Q8_0,), (Q4_0,), (GGMLType.Q4_1,), (GGMLType.Q5_0,), (GGMLType.Q5_1,), (GGMLType.IQ4_NL,)
)
def set_rows_quantized(c: CaseBuilder, type_: GGMLType) -> None:
    """The same blocks as a plain copy makes, at the rows that the ids say."""
    data, cache, plain = c.random(F32, 64, 3), c.random(type_, 64, 8), c.random(type_, 64, 3)
    ids = c.leaf(I64, np.array([6, 0, 3]))
    packed = c.node(Op.CPY, type_, (64, 3), (data, plain), alias=plain)
    stored = c.node(Op.SET_ROWS, type_, (64, 8), (data, ids, cache), alias=cache)
    one = c.node(Op.GET_ROWS, F32, (64, 8), (stored, c.leaf(I32, np.arange(8))))
    two = c.node(Op.GET_ROWS, F32, (64, 3), (packed, c.leaf(I32, np.arange(3))))
    back = c.node(Op.GET_ROWS, F32, (64, 3), (one, c.leaf(I32, np.array([6, 0, 3]))))
    c.expect(c.node(Op.SUB, F32, (64, 3), (back, two)), np.zeros((3, 64)), "exact")
    others = c.node(Op.GET_ROWS, F32, (64, 5), (one, c.leaf(I32, np.array([1, 2, 4, 5, 7]))))
    c.expect(others, c.values(cache)[0, 0, [1, 2, 4, 5, 7]], "float")


@op_case("set-rows-strided")
def set_rows_strided(c: CaseBuilder) -> None:
    """Rows that are a part of a fused projection, into a view of a larger cache."""
    fused, cache = c.random(F32, 10, 3), c.random(F16, 4, 9)
    data = c.view(fused, (4, 3), (4, 40, 120, 120), 16)
    part = c.view(cache, (4, 6), (2, 8, 48, 48), 16)
    ids = c.leaf(I64, np.array([5, 1, 0]))
    want = c.values(cache).copy()
    want[0, 0, [7, 3, 2]] = c.values(data)[0, 0].astype(np.float32).astype(np.float16)
    c.node(Op.SET_ROWS, F16, (4, 6), (data, ids, part), alias=part)
    c.expect(cache, want, "exact")


@op_case("set-rows-4d")
def set_rows_4d(c: CaseBuilder) -> None:
    """Ids repeat over the outer dimensions: index modulo extent."""
    data, cache = c.random(F32, 3, 2, 4, 2), c.random(F32, 3, 5, 4, 2)
    ids = c.leaf(I64, np.array([[[4, 1], [0, 2]]]))
    want = c.values(cache).copy()
    for q, p, i in np.ndindex(2, 4, 2):
        want[q, p, c.values(ids)[0, 0, p % 2, i]] = c.values(data)[q, p, i]
    c.expect(c.node(Op.SET_ROWS, F32, cache.ne, (data, ids, cache), alias=cache), want, "exact")


@op_case("set-rows-elements")
def set_rows_elements(c: CaseBuilder) -> None:
    """A transposed value cache: rows of one element."""
    data, cache = c.random(F32, 1, 6), c.random(F16, 1, 20)
    ids = c.leaf(I64, np.array([3, 8, 13, 4, 9, 14]))
    want = c.values(cache).copy()
    want[0, 0, c.values(ids)[0, 0, 0]] = c.values(data)[0, 0].astype(np.float32).astype(np.float16)
    c.expect(c.node(Op.SET_ROWS, F16, (1, 20), (data, ids, cache), alias=cache), want, "exact")


@op_case("set-rows-f16-data")
def set_rows_f16_data(c: CaseBuilder) -> None:
    data, cache = c.random(F16, 4, 2), c.random(F16, 4, 5)
    ids = c.leaf(I32, np.array([4, 2]))
    want = c.values(cache).copy()
    want[0, 0, [4, 2]] = c.values(data)[0, 0]
    c.expect(c.node(Op.SET_ROWS, F16, (4, 5), (data, ids, cache), alias=cache), want, "exact")


@op_case("argsort", (0,), (1,))
def argsort(c: CaseBuilder, order: int) -> None:
    """0 ascending, 1 descending; no ties, whose order ggml leaves open."""
    a = c.random(F32, 11, 3, 2)
    x = c.values(a)
    c.expect(c.node(Op.ARGSORT, I32, (11, 3, 2), (a,), (order,)), np.argsort(-x if order else x, axis=-1), "exact")


@op_case("top-k")
def top_k(c: CaseBuilder) -> None:
    """The order is open, so the values are compared after sorting them."""
    a = c.random(F32, 11, 3)
    best = c.node(Op.TOP_K, I32, (4, 3), (a,))
    picked = c.node(Op.GET_ROWS, F32, (1, 4, 3), (c.reshape(a, 1, 11, 3), best))
    order = c.node(Op.ARGSORT, I32, (4, 3), (c.reshape(picked, 4, 3),), (1,))
    in_order = c.node(Op.GET_ROWS, F32, (1, 4, 3), (picked, order))
    c.expect(in_order, -np.sort(-c.values(a)[0, 0], axis=-1)[:, :4], "exact")
