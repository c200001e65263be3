"""Cases of attention."""

from __future__ import annotations

import math

import numpy as np

from app.engine.ggml import GGMLType, Op
from app.engine.graph import Tensor
from tests.contract.cases import BF16, F16, F32, INF, NAN, CaseBuilder, Values, op_case
from tests.contract.cases_softmax import slope, softmax

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
        z = z + slope(h, heads, max_bias) * bias[seen]
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
