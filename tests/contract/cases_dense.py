"""Cases of matrix products, attention and rotation."""

from __future__ import annotations

import math

import numpy as np

from app.engine.ggml import GGMLType, Op, RopeMode
from app.engine.graph import Tensor
from tests.contract.cases import BF16, F16, F32, I32, INF, NAN, CaseBuilder, Values, op_case
from tests.contract.cases_elementwise import _slope, softmax

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
CACHE_TYPES = (
    F32,
    F16,
    BF16,
    GGMLType.Q8_0,
    GGMLType.Q4_0,
    GGMLType.Q4_1,
    GGMLType.Q5_0,
    GGMLType.Q5_1,
    GGMLType.IQ4_NL,
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


def attention(
    q: Values,
    k: Values,
    v: Values,
    mask: Values | None,
    scale: float,
    max_bias: float,
    cap: float,
    sinks: Values | None,
) -> Values:
    """One query at a time over the cells it sees; [streams, queries, heads, dv]."""
    streams, heads, queries, _ = q.shape
    out = np.zeros((streams, queries, heads, v.shape[-1]))
    for s, h, i in np.ndindex(streams, heads, queries):
        kv = h // (heads // k.shape[1])
        bias = np.zeros(k.shape[2]) if mask is None else mask[s % mask.shape[0], h % mask.shape[1], i]
        seen = np.flatnonzero(bias > -INF)
        if not seen.size:
            continue
        z = k[s, kv, seen] @ q[s, h, i] * scale
        if cap:
            z = cap * np.tanh(z / cap)
        z = z + _slope(h, heads, max_bias) * bias[seen]
        weights = softmax(z, None if sinks is None else float(sinks[h]))
        out[s, i, h] = weights @ v[s, kv, seen]
    return out


def causal_mask(c: CaseBuilder, queries: int, cells: int, seen_first: int) -> Values:
    """Query i sees the first `seen_first` + i cells."""
    return np.where(np.arange(cells) < seen_first + np.arange(queries)[:, None], 0.0, -INF)


def cache_view(
    c: CaseBuilder, type_: GGMLType, head: int, heads: int, cells: int, size: int, streams: int = 1
) -> Tensor:
    """Keys or values as attention gets them: [head, cells, heads, streams], a permuted view of cache rows."""
    cache = c.random(type_, head * heads, size, streams)
    row = cache.nb[1] // heads
    view = c.view(cache, (head, heads, cells, streams), (cache.nb[0], row, cache.nb[1], cache.nb[2]))
    return c.permute(view, 0, 2, 1, 3)


def flash(
    c: CaseBuilder,
    k: Tensor,
    v: Tensor,
    queries: int,
    heads: int,
    mask: Values | None,
    *,
    max_bias: float = 0.0,
    cap: float = 0.0,
    with_sinks: bool = False,
    kind: str = "attention",
) -> Tensor:
    head, streams, scale = k.ne[0], k.ne[3], 1 / math.sqrt(k.ne[0])
    q = c.permute(c.random(F32, head, heads, queries, streams), 0, 2, 1, 3)
    mask_leaf = None if mask is None else c.leaf(F16, mask)
    sinks = c.random(F32, heads) if with_sinks else None
    src = (q, k, v, mask_leaf, sinks)
    out = c.node(Op.FLASH_ATTN_EXT, F32, (v.ne[0], heads, queries, streams), src, (scale, max_bias, cap, 10))
    seen_mask = None if mask_leaf is None else c.values(mask_leaf)
    sink_values = None if sinks is None else c.values(sinks)[0, 0, 0]
    want = attention(c.values(q), c.values(k), c.values(v), seen_mask, scale, max_bias, cap, sink_values)
    c.expect(out, want, kind)
    return out


@op_case("flash", *((t, queries) for t in CACHE_TYPES for queries in (1, 5)))
def flash_types(c: CaseBuilder, type_: GGMLType, queries: int) -> None:
    """Four heads on two, every cache type."""
    k, v = cache_view(c, type_, 32, 2, 70, 96), cache_view(c, type_, 32, 2, 70, 96)
    flash(c, k, v, queries, 4, causal_mask(c, queries, 70, 60))


@op_case(
    "flash-options",
    ("plain", 0.0, 0.0, False),
    ("alibi", 8.0, 0.0, False),
    ("cap", 0.0, 2.0, False),
    ("sinks", 0.0, 0.0, True),
    ("all", 4.0, 3.0, True),
)
def flash_options(c: CaseBuilder, _: str, max_bias: float, cap: float, with_sinks: bool) -> None:
    """Six heads: not a power of two."""
    k, v = cache_view(c, F16, 16, 3, 40, 40), cache_view(c, F16, 24, 3, 40, 40)
    mask = causal_mask(c, 7, 40, 20)
    distance = -np.abs(np.arange(40) - 20 - np.arange(7)[:, None]).astype(float)
    mask = np.where(np.isneginf(mask), mask, distance if max_bias else 0.0)
    flash(c, k, v, 7, 6, mask, max_bias=max_bias, cap=cap, with_sinks=with_sinks)


@op_case("flash-no-mask")
def flash_no_mask(c: CaseBuilder) -> None:
    flash(c, cache_view(c, F16, 16, 2, 33, 33), cache_view(c, F16, 16, 2, 33, 33), 6, 4, None)


@op_case("flash-streams")
def flash_streams(c: CaseBuilder) -> None:
    """Two streams with masks of their own."""
    k, v = cache_view(c, F16, 16, 2, 12, 20, 2), cache_view(c, F16, 16, 2, 12, 20, 2)
    mask = np.stack([causal_mask(c, 3, 12, 2), causal_mask(c, 3, 12, 9)])[:, None]
    flash(c, k, v, 3, 4, mask)


@op_case("flash-mask-per-head")
def flash_mask_per_head(c: CaseBuilder) -> None:
    """Two mask planes for four heads: head h takes plane h mod 2."""
    k, v = cache_view(c, F16, 16, 2, 12, 20), cache_view(c, F16, 16, 2, 12, 20)
    flash(c, k, v, 3, 4, np.stack([causal_mask(c, 3, 12, 2), causal_mask(c, 3, 12, 9)]))


@op_case("flash-batch-of-sequences")
def flash_batch_of_sequences(c: CaseBuilder) -> None:
    """A prompt chunk and single tokens of other sequences, whose cells lie scattered in blocks of 64."""
    blocks = {0: [1, 4], 1: [0], 2: [2, 3]}
    mask = np.full((12, 320), -INF)
    rows = [(0, p) for p in range(70, 78)] + [(1, 12), (2, 100), (2, 101), (1, 13)]
    for i, (sequence, position) in enumerate(rows):
        for p in range(position + 1):
            mask[i, blocks[sequence][p // 64] * 64 + p % 64] = 0
    flash(c, cache_view(c, F16, 16, 1, 320, 320), cache_view(c, F16, 16, 1, 320, 320), 12, 2, mask)


@op_case("flash-window")
def flash_window(c: CaseBuilder) -> None:
    """A sliding window: early cells are hidden again."""
    cell, row = np.arange(64), np.arange(9)[:, None] + 40
    mask = np.where((cell <= row) & (cell > row - 16), 0.0, -INF)
    flash(c, cache_view(c, F16, 16, 2, 64, 64), cache_view(c, F16, 16, 2, 64, 64), 9, 4, mask)


@op_case("flash-blind-rows", (False,), (True,))
def flash_blind_rows(c: CaseBuilder, with_sinks: bool) -> None:
    """Rows that see nothing give zeros, also with sinks; the mask has more rows than there are queries."""
    mask = causal_mask(c, 6, 20, 3)
    mask[[0, 2, 3]] = -INF
    k, v = cache_view(c, F16, 16, 2, 20, 20), cache_view(c, F16, 16, 2, 20, 20)
    flash(c, k, v, 4, 4, mask, with_sinks=with_sinks)


@op_case("flash-stale-cells")
def flash_stale_cells(c: CaseBuilder) -> None:
    """Hidden cells hold NaN and infinities; a query that sees such a cell shows it, its neighbours do not."""
    cells, queries = 24, 5
    values = c.rng.standard_normal((2, cells, 16))
    values[:, 10:] = NAN
    values[:, 20] = INF
    k, v = c.leaf(F16, values), c.leaf(F16, values)
    mask = np.where(np.arange(cells) < 4 + np.arange(queries)[:, None], 0.0, -INF)
    q = c.random(F32, 16, queries, 4)
    out = c.node(Op.FLASH_ATTN_EXT, F32, (16, 4, queries), (q, k, v, c.leaf(F16, mask)), (0.25, 0.0, 0.0, 10))
    want = attention(c.values(q), c.values(k), c.values(v), mask[None, None], 0.25, 0, 0, None)
    c.expect(out, want, "attention")


@op_case("flash-sick-neighbour")
def flash_sick_neighbour(c: CaseBuilder) -> None:
    """One sequence's values are NaN; the other sequence of the batch does not notice, not even in a shared group."""
    values = c.rng.standard_normal((1, 8, 16))
    values[0, 6] = NAN
    k, v = c.leaf(F16, np.nan_to_num(values)), c.leaf(F16, values)
    mask = np.full((3, 8), -INF)
    mask[0, :6] = mask[1, :7] = mask[2, [0, 1, 2, 3, 4, 7]] = 0  # only the second query sees cell 6
    q = c.random(F32, 16, 3, 2)
    out = c.node(Op.FLASH_ATTN_EXT, F32, (16, 2, 3), (q, k, v, c.leaf(F16, mask)), (0.25, 0.0, 0.0, 10))
    want = attention(c.values(q), c.values(k), c.values(v), mask[None, None], 0.25, 0, 0, None)
    assert np.isnan(want[0, 1]).all() and np.isfinite(want[0, [0, 2]]).all()
    c.expect(out, want, "attention")


@op_case("flash-moving-mask")
def flash_moving_mask(c: CaseBuilder) -> None:
    """A mask that the program itself overwrites between two layers."""
    k, v, q = c.random(F16, 8, 6), c.random(F16, 8, 6), c.random(F32, 8, 2, 2)
    before, after = causal_mask(c, 2, 6, 1), causal_mask(c, 2, 6, 4)
    mask, new = c.leaf(F16, before), c.leaf(F16, after)
    first = c.node(Op.FLASH_ATTN_EXT, F32, (8, 2, 2), (q, k, v, mask), (0.5, 0.0, 0.0, 10))
    c.node(Op.CPY, F16, (6, 2), (new, mask), alias=mask)
    second = c.node(Op.FLASH_ATTN_EXT, F32, (8, 2, 2), (q, k, v, mask), (0.5, 0.0, 0.0, 10))
    for out, seen in ((first, before), (second, after)):
        want = attention(c.values(q), c.values(k), c.values(v), seen[None, None], 0.5, 0, 0, None)
        c.expect(out, want, "attention")


@op_case("flash-latent")
def flash_latent(c: CaseBuilder) -> None:
    """Values that are the first part of the keys (MLA): eight heads on one."""
    cache = c.random(F16, 40, 30)
    k = c.permute(c.view(cache, (40, 1, 20), (2, 80, 80, 1600)), 0, 2, 1, 3)
    v = c.permute(c.view(cache, (32, 1, 20), (2, 80, 80, 1600)), 0, 2, 1, 3)
    flash(c, k, v, 3, 8, causal_mask(c, 3, 20, 10))


@op_case("flash-long", (1,), (300,))
def flash_long(c: CaseBuilder, queries: int) -> None:
    """Longer than any tile of queries or cells."""
    k, v = cache_view(c, F16, 8, 1, 1500, 1536), cache_view(c, F16, 8, 1, 1500, 1536)
    flash(c, k, v, queries, 2, causal_mask(c, queries, 1500, 1100))


def rotated(
    x: Values,
    positions: Values,
    mode: RopeMode,
    n_dims: int,
    *,
    base: float,
    scale: float = 1.0,
    extension: float = 0.0,
    magnitude: float = 1.0,
    n_ctx: int = 0,
    factors: Values | None = None,
    sections: tuple[int, int, int, int] = (0, 0, 0, 0),
    first: int = 0,
) -> Values:
    """One pair at a time; x is [b, tokens, heads, head], positions [runs, tokens]. beta_fast is 32, beta_slow 1."""
    out = x.copy()
    pairs = n_dims if mode is RopeMode.VISION else n_dims // 2
    for t, i in np.ndindex(x.shape[1], pairs):
        exponent, run = i, 0
        if mode in (RopeMode.MROPE, RopeMode.VISION, RopeMode.IMROPE):
            sector = i % sum(sections)
            run, start = section_of(sector, sections)
            if mode is RopeMode.VISION:
                exponent = sector - start
            if mode is RopeMode.IMROPE:
                by_third = {1: (1, sections[1]), 2: (2, sections[2]), 0: (0, sections[0])}[sector % 3]
                run = by_third[0] if sector < 3 * by_third[1] else 3
        raw = positions[run, t] * base ** (-2 * exponent / n_dims) / (1 if factors is None else factors[i])
        angle, size = scale * raw, magnitude
        if extension:

            def corrected(turns: float) -> float:
                return n_dims * math.log(n_ctx / (2 * math.pi * turns)) / (2 * math.log(base))

            low, high = max(0, math.floor(corrected(32))), min(n_dims - 1, math.ceil(corrected(1)))
            ramp = 1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            angle = angle * (1 - ramp * extension) + raw * ramp * extension
            size = magnitude * (1 + 0.1 * math.log(1 / scale))
        a, b = (first + 2 * i, first + 2 * i + 1) if mode is RopeMode.NORMAL else (first + i, first + i + pairs)
        cos, sin = math.cos(angle) * size, math.sin(angle) * size
        out[:, t, :, a] = x[:, t, :, a] * cos - x[:, t, :, b] * sin
        out[:, t, :, b] = x[:, t, :, a] * sin + x[:, t, :, b] * cos
    return out


def section_of(sector: int, sections: tuple[int, ...]) -> tuple[int, int]:
    """Which section a sector lies in, and where that section starts."""
    start = 0
    for number, length in enumerate(sections[:3]):
        if sector < start + length:
            return number, start
        start += length
    return 3, start


def rope_params(
    mode: RopeMode,
    n_dims: int,
    base: float,
    scale: float = 1.0,
    extension: float = 0.0,
    magnitude: float = 1.0,
    n_ctx: int = 0,
    sections: tuple[int, ...] = (0, 0, 0, 0),
    first: int = 0,
) -> tuple[int | float, ...]:
    return (0, n_dims, mode, 0, n_ctx, base, scale, extension, magnitude, 32.0, 1.0, *sections, first)


POSITIONS = np.array([0, 1, 7, 300, 5000])


@op_case(
    "rope",
    *(
        (mode, n_dims, first)
        for mode in (RopeMode.NORMAL, RopeMode.NEOX)
        for n_dims, first in ((16, 0), (8, 0), (8, 4))
    ),
)
def rope(c: CaseBuilder, mode: RopeMode, n_dims: int, first: int) -> None:
    """All channels, some, and some in the middle."""
    x, positions = c.random(F32, 16, 3, 5), c.leaf(I32, POSITIONS)
    out = c.node(Op.ROPE, F32, x.ne, (x, positions, None), rope_params(mode, n_dims, 10000.0, first=first))
    c.expect(out, rotated(c.values(x), POSITIONS[None], mode, n_dims, base=10000.0, first=first), "product")


@op_case("rope-factors")
def rope_factors(c: CaseBuilder) -> None:
    """Llama 3's frequency factors; there may be more than are needed."""
    x, positions = c.random(F32, 16, 2, 5), c.leaf(I32, POSITIONS)
    factors = c.leaf(F32, c.rng.uniform(1, 8, 10))
    out = c.node(Op.ROPE, F32, x.ne, (x, positions, factors), rope_params(RopeMode.NORMAL, 16, 500000.0))
    values = c.values(factors)[0, 0, 0]
    c.expect(out, rotated(c.values(x), POSITIONS[None], RopeMode.NORMAL, 16, base=500000.0, factors=values), "product")


@op_case("rope-scaled", ("linear", 0.0, 64), ("yarn", 1.0, 64), ("yarn", 1.0, 8192), ("half-yarn", 0.5, 8192))
def rope_scaled(c: CaseBuilder, _: str, extension: float, n_ctx: int) -> None:
    x, positions = c.random(F32, 32, 2, 5), c.leaf(I32, POSITIONS)
    params = rope_params(RopeMode.NEOX, 32, 10000.0, 0.125, extension, 0.9, n_ctx)
    out = c.node(Op.ROPE, F32, x.ne, (x, positions), params)
    want = rotated(
        c.values(x),
        POSITIONS[None],
        RopeMode.NEOX,
        32,
        base=10000.0,
        scale=0.125,
        extension=extension,
        magnitude=float(np.float32(0.9)),
        n_ctx=n_ctx,
    )
    c.expect(out, want, "product")


@op_case("rope-moving-positions")
def rope_moving_positions(c: CaseBuilder) -> None:
    """Positions that the program itself overwrites between two rotations."""
    x, positions, later = c.random(F32, 8, 2, 2), c.leaf(I32, np.array([3, 4])), c.leaf(I32, np.array([90, 7]))
    params = rope_params(RopeMode.NEOX, 8, 10000.0)
    first = c.node(Op.ROPE, F32, x.ne, (x, positions), params)
    c.node(Op.CPY, I32, (2,), (later, positions), alias=positions)
    second = c.node(Op.ROPE, F32, x.ne, (x, positions), params)
    for out, where in ((first, [3, 4]), (second, [90, 7])):
        c.expect(out, rotated(c.values(x), np.array([where]), RopeMode.NEOX, 8, base=10000.0), "product")


@op_case("rope-sections", (RopeMode.MROPE, 24), (RopeMode.IMROPE, 24), (RopeMode.IMROPE, 16), (RopeMode.VISION, 12))
def rope_sections(c: CaseBuilder, mode: RopeMode, n_dims: int) -> None:
    """Four runs of positions, one for each section of the pairs."""
    sections = (4, 3, 3, 2) if mode is not RopeMode.VISION else (6, 6, 0, 0)
    runs = c.rng.integers(0, 50, (4, 5))
    x, positions = c.random(F32, 24, 2, 5), c.leaf(I32, runs.reshape(-1))
    out = c.node(Op.ROPE, F32, x.ne, (x, positions), rope_params(mode, n_dims, 10000.0, sections=sections))
    c.expect(out, rotated(c.values(x), runs, mode, n_dims, base=10000.0, sections=sections), "product")


@op_case("rope-in-place")
def rope_in_place(c: CaseBuilder) -> None:
    """A shift of cached keys: part of a cache row, in place; negative positions turn back."""
    cache, positions = c.random(F32, 24, 6), c.leaf(I32, np.array([-3, 0, -1000, 2]))
    part = c.view(cache, (8, 2, 4), (4, 32, 96, 384), 96 + 16)
    want = rotated(c.values(part), np.array([[-3, 0, -1000, 2]]), RopeMode.NEOX, 8, base=10000.0)
    c.expect(
        c.node(Op.ROPE, F32, part.ne, (part, positions), rope_params(RopeMode.NEOX, 8, 10000.0), alias=part),
        want,
        "product",
    )


@op_case("rope-f16-streams")
def rope_f16_streams(c: CaseBuilder) -> None:
    """Half floats, and a fourth dimension that repeats the positions."""
    x, positions = c.random(F16, 8, 2, 3, 2), c.leaf(I32, np.array([4, 9, 2]))
    out = c.node(Op.ROPE, F16, x.ne, (x, positions), rope_params(RopeMode.NORMAL, 8, 10000.0))
    c.expect(out, rotated(c.values(x), np.array([[4, 9, 2]]), RopeMode.NORMAL, 8, base=10000.0), "f16")


@op_case("rope-strided")
def rope_strided(c: CaseBuilder) -> None:
    """Queries inside a fused projection [q | gate]."""
    fused, positions = c.random(F32, 16, 3, 2), c.leaf(I32, np.array([11, 12]))
    q = c.view(fused, (8, 3, 2), fused.nb)
    out = c.node(Op.ROPE, F32, (8, 3, 2), (q, positions), rope_params(RopeMode.NEOX, 8, 10000.0))
    c.expect(out, rotated(c.values(q), np.array([[11, 12]]), RopeMode.NEOX, 8, base=10000.0), "product")
