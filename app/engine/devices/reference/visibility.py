"""What an attention mask shows: queries in groups that see much the same cells, so work follows what is visible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.devices.reference.operand import Floats

#: Scores of one group (heads x queries x cells) that are held at a time.
MAX_SCORES = 1 << 21
MAX_GROUP_ROWS = 256

Cells = slice | NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive queries and the cells at least one of them sees.

    `bias` [queries, cells] are the mask's finite values, None when all are 0; `hidden` of the same shape marks what a
    query does not see, None when each sees every cell of the group.
    """

    rows: slice
    cells: Cells
    bias: Floats | None
    hidden: NDArray[np.bool_] | None

    @property
    def n_scores(self) -> int:
        n_cells = self.cells.stop - self.cells.start if isinstance(self.cells, slice) else len(self.cells)
        n_rows: int = self.rows.stop - self.rows.start
        return n_rows * n_cells


@dataclass(frozen=True, slots=True)
class Visibility:
    """The groups of one mask plane, and the rows that see nothing at all."""

    groups: tuple[Group, ...]
    blind: NDArray[np.intp]


def everything(n_queries: int, n_cells: int, heads: int) -> Visibility:
    """What queries see without a mask."""
    height = _group_height(n_cells, heads)
    cuts = (slice(first, min(first + height, n_queries)) for first in range(0, n_queries, height))
    groups = tuple(Group(rows, slice(0, n_cells), None, None) for rows in cuts)
    return Visibility(groups, np.empty(0, np.intp))


def read_mask(mask: NDArray[np.float16], heads: int) -> Visibility:
    """Groups of a mask plane [n_queries, n_cells], whose minus infinities hide cells."""
    visible = mask.view(np.uint16) != np.float16(-np.inf).view(np.uint16)
    seen_by_row = visible.sum(axis=1)
    shared = np.zeros(len(mask), np.intp)  # cells a query and the one before it both see
    shared[1:] = (visible[1:] & visible[:-1]).sum(axis=1)
    starts_alone = 2 * shared < seen_by_row

    groups: list[Group] = []
    first = 0
    while first < len(mask):
        if seen_by_row[first] == 0:
            first += 1
            continue
        height = _group_height(int(seen_by_row[first : first + MAX_GROUP_ROWS].max()), heads)
        end = first + 1
        while end < min(first + height, len(mask)) and seen_by_row[end] and not starts_alone[end]:
            end += 1
        groups.append(_group(mask, visible, slice(first, end)))
        first = end
    return Visibility(tuple(groups), np.flatnonzero(seen_by_row == 0))


def _group_height(n_cells: int, heads: int) -> int:
    return max(1, min(MAX_GROUP_ROWS, MAX_SCORES // max(1, heads * n_cells)))


def _group(mask: NDArray[np.float16], visible: NDArray[np.bool_], rows: slice) -> Group:
    seen = np.flatnonzero(visible[rows].any(axis=0))
    contiguous = seen[-1] - seen[0] + 1 == len(seen)
    cells: Cells = slice(int(seen[0]), int(seen[-1]) + 1) if contiguous else seen
    hidden = ~visible[rows][:, cells]
    bias = np.where(hidden, np.float16(0), mask[rows][:, cells]).astype(np.float32)
    return Group(rows, cells, bias if bias.any() else None, hidden if hidden.any() else None)
