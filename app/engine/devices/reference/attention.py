"""FLASH_ATTN_EXT: softmax(scale * q k + mask) v, over the cells that are visible and no others.

Cells nobody sees are never read: stale memory may hold NaN. A cell that some queries of a group see and others do not
is selected away for the others, never multiplied by zero.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats, Operand, to_f32
from app.engine.devices.reference.softmax import alibi_slopes, softmax_in_place
from app.engine.devices.reference.visibility import Cells, Group, Visibility, everything, read_mask
from app.engine.ggml import Op

#: Products of queries and keys from which on threads share them.
PARALLEL_WORK = 1 << 22


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads on one key head that share a mask plane."""

    query: slice
    key: int
    plane: int


def _flash_attn_ext(n: Node) -> Step:
    q, k, mask = n.src(0), n.src(1), n.optional(3)
    n_queries, n_heads, n_streams = q.ne[1], q.ne[2], q.ne[3]
    mask_planes, mask_streams = (1, 1) if mask is None else (mask.ne[2], mask.ne[3])
    parts = _split_heads(n_heads, k.ne[2], mask_planes)
    shape = (n_queries, k.ne[1], n_heads)
    look = n.shared("visibility", (mask,), lambda: _look(mask, *shape), shape)
    some = _SomeHeads(n)

    def step() -> None:
        seen = look()
        work = []
        for stream, part in itertools.product(range(n_streams), parts):
            visibility = seen[stream % mask_streams][part.plane]
            some.out[stream, visibility.blind, part.query] = 0
            work += [(stream, part, group) for group in visibility.groups]
        if sum(group.n_scores for *_, group in work) * q.ne[0] < PARALLEL_WORK:
            for item in work:
                some.attend(*item)
        else:
            n.context.workers.for_each(work, lambda item: some.attend(*item))

    return step


def _split_heads(n_heads: int, n_key_heads: int, planes: int) -> list[Heads]:
    """Query heads in slices that share a key head and, where a mask has a plane per head, one plane."""
    ratio = n_heads // n_key_heads
    if planes == 1:
        return [Heads(slice(h * ratio, (h + 1) * ratio), h, 0) for h in range(n_key_heads)]
    return [Heads(slice(h, h + 1), h // ratio, h % planes) for h in range(n_heads)]


def _look(mask: Operand | None, n_queries: int, n_cells: int, heads: int) -> list[list[Visibility]]:
    """What each plane of each stream of the mask shows, [stream][plane]."""
    if mask is None:
        return [[everything(n_queries, n_cells, heads)]]
    return [[read_mask(plane[:n_queries], heads) for plane in stream] for stream in mask.array]


class _SomeHeads:
    """Attention of a few query heads over one key head."""

    def __init__(self, n: Node) -> None:
        self.q, self.k, self.v = n.src(0).array, n.src(1), n.src(2)
        sinks = n.optional(4)
        self.sinks = None if sinks is None else sinks.array.reshape(-1, 1, 1)
        self.out = n.out.array  # [streams, queries, heads, dv]
        self.scale, max_bias, self.cap = (np.float32(n.param_f32(i)) for i in range(3))
        self.slopes = alibi_slopes(n.src(0).ne[2], float(max_bias)).reshape(-1, 1, 1)

    def attend(self, stream: int, heads: Heads, group: Group) -> None:
        """Compute and write the result of one group of queries."""
        keys = self._cells(self.k, stream, heads.key, group.cells)
        values = self._cells(self.v, stream, heads.key, group.cells)
        queries = self.q[stream, heads.query, group.rows]  # [heads, queries, dk]
        scores = np.matmul(queries, keys.T)
        scores *= self.scale
        if self.cap > 0:
            scores = self.cap * np.tanh(scores / self.cap)
        if group.bias is not None:
            scores += self.slopes[heads.query] * group.bias
        if group.hidden is not None:
            np.copyto(scores, np.float32(-np.inf), where=group.hidden)
        softmax_in_place(scores, None if self.sinks is None else self.sinks[heads.query])
        result = _weighted(scores, values, group)  # [heads, queries, dv]
        self.out[stream, group.rows, heads.query] = result.swapaxes(0, 1)

    @staticmethod
    def _cells(cache: Operand, stream: int, head: int, cells: Cells) -> Floats:
        """Some cells of one head of a cache as float32 [cells, head size]."""
        return to_f32(cache.type, cache.array[stream, head, cells])


def _weighted(weights: Floats, values: Floats, group: Group) -> Floats:
    """weights [heads, queries, cells] times values [cells, dv], where a weight of a hidden cell takes nothing from it.

    A product with a weight of 0 would spread the NaN or infinity of a cell to queries that do not see it.
    """
    result: Floats
    sound = None if group.hidden is None else np.isfinite(values).all(axis=1)
    if group.hidden is None or sound is None or sound.all():
        result = np.matmul(weights, values)
        return result
    result = np.matmul(weights[..., sound], values[sound])
    for cell in np.flatnonzero(~sound):
        sees = ~group.hidden[:, cell]
        result[:, sees] += weights[:, sees, cell, None] * values[cell]
    return result


BINDERS: dict[Op, Binder] = {Op.FLASH_ATTN_EXT: _flash_attn_ext}
