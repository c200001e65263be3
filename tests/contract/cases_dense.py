"""Cases of matrix products."""

from __future__ import annotations

import numpy as np

from app.engine.ggml import GGMLType, Op
from tests.contract.cases import BF16, F16, F32, I32, CaseBuilder, Values, op_case

SMALL_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
LARGE_BLOCKS = (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_XS",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
    "TQ1_0",
    "TQ2_0",
)


def product(a: Values, b: Values) -> Values:
    """a [A3, A2, n, k], b [B3, B2, m, k] -> [B3, B2, m, n]; stacks of a serve by division."""
    r3, r2 = b.shape[0] // a.shape[0], b.shape[1] // a.shape[1]
    return np.stack([[b[q, p] @ a[q // r3, p // r2].T for p in range(b.shape[1])] for q in range(b.shape[0])])


def kind_of(type_: GGMLType) -> str:
    return "product" if type_ in (F32, F16, BF16) else "quantized"


@op_case("mul-mat", *((GGMLType[t], m) for t in ("F32", "F16", "BF16", *SMALL_BLOCKS) for m in (1, 2, 9)))
def mul_mat(c: CaseBuilder, type_: GGMLType, m: int) -> None:
    a, b = c.random(type_, 96, 11), c.random(F32, 96, m)
    c.expect(c.node(Op.MUL_MAT, F32, (11, m), (a, b)), product(c.values(a), c.values(b)), kind_of(type_))


@op_case("mul-mat-256", *((GGMLType[t], m) for t in LARGE_BLOCKS for m in (1, 3)))
def mul_mat_256(c: CaseBuilder, type_: GGMLType, m: int) -> None:
    a, b = c.random(type_, 512, 5), c.random(F32, 512, m)
    c.expect(c.node(Op.MUL_MAT, F32, (5, m), (a, b)), product(c.values(a), c.values(b)), kind_of(type_))


@op_case("mul-mat-tall", (GGMLType.Q4_0, 1), (GGMLType.Q8_0, 33), (F16, 1), (F16, 20))
def mul_mat_tall(c: CaseBuilder, type_: GGMLType, m: int) -> None:
    """More rows than any tile has, and not a multiple of one."""
    a, b = c.random(type_, 64, 4099), c.random(F32, 64, m)
    c.expect(c.node(Op.MUL_MAT, F32, (4099, m), (a, b)), product(c.values(a), c.values(b)), kind_of(type_))


@op_case("mul-mat-stacks", *((t, m) for t in (F32, F16, GGMLType.Q8_0) for m in (1, 4)))
def mul_mat_stacks(c: CaseBuilder, type_: GGMLType, m: int) -> None:
    """Grouped heads: six on two matrices, by division, and two streams on one."""
    a, b = c.random(type_, 32, 7, 2, 1), c.random(F32, 32, m, 6, 2)
    c.expect(c.node(Op.MUL_MAT, F32, (7, m, 6, 2), (a, b)), product(c.values(a), c.values(b)), kind_of(type_))


@op_case("mul-mat-kq", (F16,), (F32,))
def mul_mat_kq(c: CaseBuilder, type_: GGMLType) -> None:
    """Scores without flash attention: a permuted cache view times permuted queries."""
    head, kv_heads, cells, heads, tokens = 8, 2, 6, 4, 3
    cache = c.random(type_, head * kv_heads, 10)
    size = cache.nb[0]
    k = c.view(cache, (head, kv_heads, cells), (size, size * head, cache.nb[1], cache.nb[1] * cells))
    k = c.permute(k, 0, 2, 1, 3)
    q = c.permute(c.random(F32, head, heads, tokens), 0, 2, 1, 3)
    out = c.node(Op.MUL_MAT, F32, (cells, tokens, heads), (k, q), (10,))
    c.expect(out, product(c.values(k), c.values(q)), "product")


@op_case("mul-mat-kqv")
def mul_mat_kqv(c: CaseBuilder) -> None:
    """Probabilities times a transposed value cache."""
    head, kv_heads, cells, heads, tokens, size = 8, 2, 6, 4, 3, 10
    cache = c.random(F16, size * head * kv_heads)
    v = c.view(cache, (cells, head, kv_heads), (2, 2 * size, 2 * size * head, 2 * size * head * kv_heads))
    p = c.random(F32, cells, tokens, heads)
    out = c.node(Op.MUL_MAT, F32, (head, tokens, heads), (v, p))
    c.expect(out, product(c.values(v), c.values(p)), "product")


@op_case("mul-mat-16-bit-activations", (F16, F16), (BF16, BF16))
def mul_mat_16_bit(c: CaseBuilder, a_type: GGMLType, b_type: GGMLType) -> None:
    a, b = c.random(a_type, 40, 5), c.random(b_type, 40, 3)
    c.expect(c.node(Op.MUL_MAT, F32, (5, 3), (a, b)), product(c.values(a), c.values(b)), "product")


@op_case("mul-mat-strided-rows")
def mul_mat_strided_rows(c: CaseBuilder) -> None:
    """A part of the rows of a quantized weight, and activations that are a view of a wider tensor."""
    weight, wide = c.random(GGMLType.Q4_0, 64, 10), c.random(F32, 100, 3)
    a = c.view(weight, (64, 4), (18, 36, 360, 360), 3 * 36)
    b = c.view(wide, (64, 3), (4, 400, 1200, 1200), 80)
    c.expect(c.node(Op.MUL_MAT, F32, (4, 3), (a, b)), product(c.values(a), c.values(b)), "quantized")


@op_case(
    "mul-mat-id",
    *(
        (t, shared, tokens)
        for t in ("F32", "F16", "Q8_0", "Q4_0", "MXFP4")
        for shared in (True, False)
        for tokens in (1, 7)
    ),
)
def mul_mat_id(c: CaseBuilder, type_name: str, shared: bool, tokens: int) -> None:
    """Three of five experts per token; ids are the first columns of the sorted matrix."""
    type_, k, n, experts, used = GGMLType[type_name], 64, 9, 5, 3
    a, b = c.random(type_, k, n, experts), c.random(F32, k, 1 if shared else used, tokens)
    order = c.leaf(I32, np.array([c.rng.permutation(experts) for _ in range(tokens)]))
    ids = c.view(order, (used, tokens), (4, 4 * experts, 4 * experts * tokens, 4 * experts * tokens))
    w, x, chosen, want = c.values(a), c.values(b), c.values(ids)[0, 0], np.empty((tokens, used, n))
    for t, j in np.ndindex(tokens, used):
        want[t, j] = w[0, chosen[t, j]] @ x[0, t, 0 if shared else j]
    c.expect(c.node(Op.MUL_MAT_ID, F32, (n, used, tokens), (a, b, ids)), want, kind_of(type_))
