"""The attention mask of one ubatch, as half floats: 0 where a query may look, minus infinity elsewhere.

Rows are query tokens, columns are KV cells. What a mask holds follows from little, its recipe: which rows are whose,
and where the cells of each sequence lie. The rows of a sequence are adjacent and so are their positions; each sees the
cells of its own past and itself, with a window the last of them alone. So the recipe travels, and the mask is built
where it is needed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Bits of float16 minus infinity; masks are handled as integers, since they are only copied and compared.
HIDDEN = np.uint16(0xFC00)
VISIBLE = np.uint16(0)
MASK_BYTES = HIDDEN.itemsize

#: The longest recipe that travels. It bounds, with the two below, what reading and building one takes.
MAX_PACKED_BYTES = 64 << 10
MAX_ROWS = 1 << 16
MAX_CELLS = 1 << 24

_WORD_BYTES = 4
_HEAD_WORDS = 4
_SEQUENCE_WORDS = 3


class CellRun(NamedTuple):
    """Cells one behind the other."""

    first_cell: int
    n_cells: int

    @property
    def end(self) -> int:
        return self.first_cell + self.n_cells


class MaskRows(NamedTuple):
    """The rows of one sequence, and the cells of all its positions up to that of the last row, in order of position."""

    first_row: int
    n_rows: int
    runs: tuple[CellRun, ...]

    @property
    def end(self) -> int:
        return self.first_row + self.n_rows


@dataclass(frozen=True)
class MaskRecipe:
    """All that a mask [n_tokens, n_kv] holds. With a window a row sees the last `window` positions, itself included.

    Sequences rise by row and do not share any; the runs of each rise by cell, and hold a cell for each row at least.
    Rows of no sequence see nothing: they are padding.
    """

    n_tokens: int
    n_kv: int
    window: int | None
    sequences: tuple[MaskRows, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_tokens, self.n_kv

    @property
    def n_bytes(self) -> int:
        """Of the mask."""
        return self.n_tokens * self.n_kv * MASK_BYTES

    @property
    def has_prompt(self) -> bool:
        """Whether some sequence has several rows: then little of the mask is as it was in the ubatch before."""
        return any(rows.n_rows > 1 for rows in self.sequences)

    @cached_property
    def array(self) -> NDArray[np.uint16]:
        """The mask; not to be changed."""
        mask = np.empty(self.shape, np.uint16)
        self.build(mask)
        mask.flags.writeable = False
        return mask

    def build(self, into: NDArray[np.uint16]) -> None:
        """Make the mask in memory [n_tokens, n_kv]."""
        into.fill(HIDDEN)
        for first_row, n_rows, runs in self.sequences:
            if n_rows == 1 and self.window is None:  # decoding: all of it is the past
                for cell, n in runs:
                    into[first_row, cell : cell + n] = VISIBLE
                continue
            rows = into[first_row : first_row + n_rows]
            seen = _staircase(n_rows, sum(n for _, n in runs), self.window)
            at = 0
            for cell, n in runs:
                rows[:, cell : cell + n] = seen[:, at : at + n]
                at += n

    @cached_property
    def packed(self) -> bytes:
        """As it travels, in little-endian u32: n_tokens, n_kv, window (0: none), the number of sequences; of each the
        first row, the number of rows, the number of runs; of each run the first cell and the number of cells.
        """
        words = [self.n_tokens, self.n_kv, self.window or 0, len(self.sequences)]
        for rows in self.sequences:
            words += rows.first_row, rows.n_rows, len(rows.runs)
            for run in rows.runs:
                words += run
        return struct.pack(f"<{len(words)}I", *words)

    @staticmethod
    def unpack(packed: memoryview) -> MaskRecipe:
        """Raises ValueError for what `packed` never is. Keeps no view of it."""
        n_bytes = len(packed)
        if n_bytes > MAX_PACKED_BYTES:
            raise ValueError(f"a mask's recipe of {n_bytes} bytes, at most {MAX_PACKED_BYTES} are taken")
        if n_bytes % _WORD_BYTES or n_bytes < _HEAD_WORDS * _WORD_BYTES:
            raise ValueError(f"{n_bytes} bytes are no recipe of a mask")
        words = struct.unpack(f"<{n_bytes // _WORD_BYTES}I", packed)
        n_tokens, n_kv, window, n_sequences = words[:_HEAD_WORDS]
        if not (0 < n_tokens <= MAX_ROWS and 0 < n_kv <= MAX_CELLS):
            raise ValueError(f"a mask of {n_tokens} rows and {n_kv} cells, allowed are {MAX_ROWS} and {MAX_CELLS}")
        sequences: list[MaskRows] = []
        at, row = _HEAD_WORDS, 0
        for _ in range(n_sequences):
            rows, at = _unpack_rows(words, at)
            _check_rows(rows, row, n_tokens, n_kv)
            sequences.append(rows)
            row = rows.end
        if at != len(words):
            raise ValueError(f"{(len(words) - at) * _WORD_BYTES} bytes follow a mask's recipe")
        return MaskRecipe(n_tokens, n_kv, window or None, tuple(sequences))


def runs_of(blocks: NDArray[np.int32], n_positions: int, block_cells: int) -> tuple[CellRun, ...]:
    """Where the first `n_positions` positions of a sequence lie; position p is cell p % block_cells of its block.

    `blocks` strictly rise. Those that follow each other are one run.
    """
    n_blocks = -(-n_positions // block_cells)
    first, last = int(blocks[0]), int(blocks[n_blocks - 1])
    if last - first == n_blocks - 1:
        return (CellRun(first * block_cells, n_positions),)
    used = blocks[:n_blocks]
    breaks = (np.flatnonzero(np.diff(used) != 1) + 1).tolist()
    firsts = used[[0, *breaks]].tolist()
    starts = [start * block_cells for start in (0, *breaks)]
    ends = [*starts[1:], n_positions]  # the last block may be filled in part
    return tuple(CellRun(block * block_cells, end - at) for block, at, end in zip(firsts, starts, ends, strict=True))


def _staircase(n_rows: int, n_cells: int, window: int | None) -> NDArray[np.uint16]:
    """What each row sees of its sequence's cells [n_rows, n_cells], the last row all or `window` of them.

    Every row is the one before, moved by one cell: all are views of one line.
    """
    line = np.full(n_cells + n_rows - 1, HIDDEN, np.uint16)
    line[0 if window is None else max(0, n_cells - window) : n_cells] = VISIBLE
    return np.ndarray((n_rows, n_cells), np.uint16, line, (n_rows - 1) * MASK_BYTES, (-MASK_BYTES, MASK_BYTES))


def _unpack_rows(words: tuple[int, ...], at: int) -> tuple[MaskRows, int]:
    """The sequence that begins at a word, and where the next one does."""
    head_end = at + _SEQUENCE_WORDS
    if head_end > len(words):
        raise ValueError("a mask's recipe ends in the middle of a sequence")
    first_row, n_rows, n_runs = words[at:head_end]
    end = head_end + 2 * n_runs
    if end > len(words):
        raise ValueError(f"a mask's recipe announces {n_runs} runs of cells, but ends before the last of them")
    runs = map(CellRun, words[head_end:end:2], words[head_end + 1 : end : 2])
    return MaskRows(first_row, n_rows, tuple(runs)), end


def _check_rows(rows: MaskRows, least_row: int, n_tokens: int, n_kv: int) -> None:
    if not (rows.n_rows and least_row <= rows.first_row and rows.end <= n_tokens):
        raise ValueError(
            f"a sequence has {rows.n_rows} rows from {rows.first_row} on, "
            f"but must have some of rows {least_row} to {n_tokens} of the mask"
        )
    least_cell = n_cells = 0
    for run in rows.runs:
        if not (run.n_cells and least_cell <= run.first_cell and run.end <= n_kv):
            raise ValueError(
                f"a run of {run.n_cells} cells from {run.first_cell} on, "
                f"but it must be some of cells {least_cell} to {n_kv} of the mask"
            )
        least_cell = run.end
        n_cells += run.n_cells
    if n_cells < rows.n_rows:
        raise ValueError(f"a sequence has {rows.n_rows} rows, but {n_cells} cells for them")
