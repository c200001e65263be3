"""The attention mask of one ubatch, as half floats: 0 where a query may look, minus infinity elsewhere.

Rows are query tokens, columns are KV cells. A sequence's cell of position p is cell p % 64 of its block p // 64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Bits of float16 minus infinity; masks are handled as integers, since they are only copied and compared.
HIDDEN = np.uint16(0xFC00)
VISIBLE = np.uint16(0)


def cells_of(blocks: NDArray[np.int32], n_positions: int, block_tokens: int) -> NDArray[np.int64]:
    """Cell of each of a sequence's first `n_positions` positions."""
    starts = blocks.astype(np.int64) * block_tokens
    cells = (starts[:, None] + np.arange(block_tokens)).reshape(-1)
    return cells[:n_positions]


def hide_all(n_tokens: int, n_kv: int) -> NDArray[np.uint16]:
    """A mask [n_tokens, n_kv] that shows nothing; what padding rows keep."""
    return np.full((n_tokens, n_kv), HIDDEN, dtype=np.uint16)


def show_sequence(
    mask: NDArray[np.uint16],
    rows: slice,
    positions: NDArray[np.int32],
    cells: NDArray[np.int64],
    window: int | None,
) -> None:
    """Let query rows of one sequence see its own past and themselves.

    `positions` are those of the rows; `cells` is the cell of every position up to the last of them. With a window a
    query sees the last `window` positions, itself included.
    """
    if len(positions) == 1:  # decoding: all of it is the past
        mask[rows.start, cells if window is None else cells[-window:]] = VISIBLE
        return
    past = np.arange(len(cells), dtype=np.int32)
    seen = past <= positions[:, None]
    if window is not None:
        seen &= past > positions[:, None] - window
    mask[rows, cells] = np.where(seen, VISIBLE, HIDDEN)
