"""MUL_MAT and MUL_MAT_ID: products with weights of any type, unpacked a tile of rows at a time.

A tile is small enough to stay in a core's cache, and no unpacked weight outlives its tile: one copy of the model stays
one copy. Products are float32 by BLAS.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from app.engine.devices.reference.blockwise import SPLITS, dot_rows
from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats, Operand, View, to_f32
from app.engine.devices.reference.rows import checked_ids
from app.engine.ggml import Op

#: Values of a tile: the unpacked weights of one task.
TILE_VALUES = 128 * 1024


class Tile(NamedTuple):
    """Rows of one matrix of a stack."""

    i3: int
    i2: int
    rows: slice


def tiles_of(a: Operand) -> list[Tile]:
    """All rows of all matrices, cut into tiles."""
    height = max(16, TILE_VALUES // a.ne[0])
    cuts = [slice(first, min(first + height, a.ne[1])) for first in range(0, a.ne[1], height)]
    return [Tile(i3, i2, rows) for i3, i2, rows in itertools.product(range(a.ne[3]), range(a.ne[2]), cuts)]


def _mul_mat(n: Node) -> Step:
    """y[i, j, p, q] = sum over k of A[k, i, p / r2, q / r3] * B[k, j, p, q]; r2, r3 are how often A's stacks repeat."""
    a, b, out = n.src(0), n.src(1), n.out
    k, m = a.ne[0], b.ne[1]
    r2, r3 = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    grouped = (a.ne[3], r3, a.ne[2], r2)

    def group(x: Operand) -> View:
        """[n3, n2, n1, n0] as [A3, r3, A2, r2, n1, n0]."""
        nb0, nb1, nb2, nb3 = x.tensor.nb
        return x.strided((*grouped, x.ne[1], x.ne[0]), (nb3 * r3, nb3, nb2 * r2, nb2, nb1, nb0))

    y: Floats = group(out)
    b_grouped = group(b)
    if a.is_f32 and (a.ne[2] * a.ne[3] > 1 or a.tensor.n_elements < TILE_VALUES):  # many small ones: all in one call
        matrices = np.swapaxes(a.array, -1, -2)[:, None, :, None]
        return lambda: np.matmul(to_f32(b.type, b_grouped), matrices, out=y)
    tiles, workers, one_vector = tiles_of(a), n.context.workers, m == r2 == r3 == 1

    def step() -> None:
        x = to_f32(b.type, b_grouped)

        def product(tile: Tile) -> None:
            i3, i2, rows = tile
            packed = a.array[i3, i2, rows]
            if one_vector and a.type in SPLITS:
                y[i3, 0, i2, 0, 0, rows] = dot_rows(a.type, packed, x[i3, 0, i2, 0, 0], workers)
                return
            w = to_f32(a.type, packed, workers.scratch(len(packed) * k).reshape(-1, k))
            if one_vector:
                np.dot(w, x[i3, 0, i2, 0, 0], out=y[i3, 0, i2, 0, 0, rows])
            else:
                np.matmul(x[i3, :, i2], w.T, out=y[i3, :, i2, :, :, rows])

        workers.for_each(tiles, product)

    return step


def _mul_mat_id(n: Node) -> Step:
    """y[:, j, t] = A[:, :, ids[j, t]]^T B[:, j mod u, t]: an expert takes all rows that chose it at once."""
    a, b, ids, out = n.src(0), n.src(1), n.src(2), n.out
    x: Floats = b.array[0]  # [tokens, u, k]
    y: Floats = out.array[0]  # [tokens, chosen, n]
    k, shared_rows = a.ne[0], b.ne[1]
    tiles, workers = tiles_of(a), n.context.workers

    def step() -> None:
        chosen = checked_ids(n, ids, a.ne[2])[0, 0]  # [tokens, chosen]
        users = {int(expert): np.nonzero(chosen == expert) for expert in np.unique(chosen)}
        inputs = {expert: x[token, slot % shared_rows] for expert, (token, slot) in users.items()}

        def product(tile: Tile) -> None:
            expert, rows = tile.i2, tile.rows
            packed = a.array[0, expert, rows]
            token, slot = users[expert]
            if len(token) == 1 and a.type in SPLITS:
                y[token, slot, rows] = dot_rows(a.type, packed, inputs[expert][0], workers)
                return
            w = to_f32(a.type, packed, workers.scratch(len(packed) * k).reshape(-1, k))
            y[token, slot, rows] = inputs[expert] @ w.T

        workers.for_each([tile for tile in tiles if tile.i2 in users], product)

    return step


BINDERS: dict[Op, Binder] = {Op.MUL_MAT: _mul_mat, Op.MUL_MAT_ID: _mul_mat_id}
