"""Ops that pick rows by id. Ids are data, so they are checked here, before anything is written."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Operand, encode, to_f32
from app.engine.ggml import GGMLType, Op
from app.errors import DeviceError


def checked_ids(n: Node, ids: Operand, n_rows: int) -> NDArray[np.int64]:
    """Row ids as int64 [n3, n2, n1, n0]. Raises DeviceError if one is not in 0 .. n_rows - 1."""
    values = ids.array.astype(np.int64)
    if values.size and (values.min() < 0 or values.max() >= n_rows):
        wrong = values[(values < 0) | (values >= n_rows)][0]
        what = f"{n.out.tensor.op.name} {n.out.tensor.name}".rstrip()
        raise DeviceError(f"{what}: row id {wrong} is out of range, the table has {n_rows} rows")
    return values


def _get_rows(n: Node) -> Step:
    """y[:, i, p, q] = s0[:, ids[i, p, q], p, q]."""
    table, ids, out = n.src(0), n.src(1), n.out
    planes = list(itertools.product(range(out.ne[3]), range(out.ne[2])))

    def step() -> None:
        rows = checked_ids(n, ids, table.ne[1])[0]
        for q, p in planes:
            picked = table.array[q, p, rows[q, p]]
            np.copyto(out.array[q, p], picked if table.type is GGMLType.I32 else to_f32(table.type, picked))

    return step


def _set_rows(n: Node) -> Step:
    """out[:, ids[i, p mod d1, q mod d2], p, q] = s0[:, i, p, q], converted. Of equal ids one wins."""
    data, ids, out = n.src(0), n.src(1), n.out
    planes = list(itertools.product(range(out.ne[3]), range(out.ne[2])))
    d1, d2 = ids.ne[1], ids.ne[2]

    def step() -> None:
        rows = checked_ids(n, ids, out.ne[1])[0]
        values = data.array if data.type == out.type else encode(out.type, data.load())
        for q, p in planes:
            out.array[q, p, rows[q % d2, p % d1]] = values[q, p]

    return step


def _add_id(n: Node) -> Step:
    """y[:, j, t] = s0[:, j, t] + s1[:, ids[j, t]]."""
    a, table, ids, out = n.src(0).array, n.src(1), n.src(2), n.out.array

    def step() -> None:
        rows = checked_ids(n, ids, table.ne[1])[0, 0]
        np.add(a, table.array[0, 0, rows], out=out)

    return step


BINDERS: dict[Op, Binder] = {Op.GET_ROWS: _get_rows, Op.SET_ROWS: _set_rows, Op.ADD_ID: _add_id}
