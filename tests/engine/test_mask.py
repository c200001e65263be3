"""Masks of their recipes: what rows see, the same bits as going by every row and cell, and recipes nobody has made."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.engine.mask import (
    HIDDEN,
    MAX_CELLS,
    MAX_PACKED_BYTES,
    MAX_ROWS,
    VISIBLE,
    CellRun,
    MaskRecipe,
    MaskRows,
    runs_of,
)

BLOCK = 4


def naive(
    n_tokens: int, n_kv: int, window: int | None, sequences: Sequence[tuple[int, int, int, Sequence[int]]]
) -> NDArray[np.uint16]:
    """Cell by cell. A sequence: first row, number of rows, first position, blocks of `BLOCK` cells."""
    mask = np.full((n_tokens, n_kv), HIDDEN, np.uint16)
    for first_row, n_rows, first_position, blocks in sequences:
        for i in range(n_rows):
            position = first_position + i
            for past in range(position + 1):
                if window is None or past > position - window:
                    mask[first_row + i, blocks[past // BLOCK] * BLOCK + past % BLOCK] = VISIBLE
    return mask


@st.composite
def ubatches(draw: st.DrawFn) -> tuple[int, int, int | None, list[tuple[int, int, int, list[int]]]]:
    """Decoding rows and prompts beside each other, padding behind and between them, blocks with gaps and in a row."""
    n_blocks = draw(st.integers(1, 12))
    sequences = []
    row = 0
    for _ in range(draw(st.integers(0, 5))):
        row += draw(st.sampled_from([0, 0, 0, 2]))
        blocks = sorted(draw(st.sets(st.integers(0, n_blocks - 1), min_size=1)))
        n_most = len(blocks) * BLOCK
        n_rows = draw(st.one_of(st.just(1), st.integers(1, n_most)))
        sequences.append((row, n_rows, draw(st.integers(0, n_most - n_rows)), blocks))
        row += n_rows
    window = draw(st.one_of(st.none(), st.integers(1, 60)))
    return max(1, row + draw(st.integers(0, 3))), n_blocks * BLOCK, window, sequences


def recipe_of(ubatch: tuple[int, int, int | None, list[tuple[int, int, int, list[int]]]]) -> MaskRecipe:
    n_tokens, n_kv, window, sequences = ubatch
    rows = [
        MaskRows(row, n, runs_of(np.array(blocks, np.int32), first + n, BLOCK)) for row, n, first, blocks in sequences
    ]
    return MaskRecipe(n_tokens, n_kv, window, tuple(rows))


@settings(max_examples=300, deadline=None)
@given(ubatches())
def test_a_mask_is_what_every_row_and_cell_says(
    ubatch: tuple[int, int, int | None, list[tuple[int, int, int, list[int]]]],
) -> None:
    want, recipe = naive(*ubatch), recipe_of(ubatch)
    assert np.array_equal(recipe.array, want)
    memory = np.full(recipe.shape, 0x1234, np.uint16)
    travelled = MaskRecipe.unpack(memoryview(recipe.packed))
    travelled.build(memory)
    assert travelled == recipe and np.array_equal(memory, want)
    assert recipe.n_bytes == want.nbytes and recipe.has_prompt == any(n > 1 for _, n, _, _ in ubatch[3])


def test_blocks_in_a_row_are_one_run() -> None:
    blocks = np.array([2, 3, 4, 7, 9, 10, 11], np.int32)
    assert runs_of(blocks, 11, BLOCK) == (CellRun(8, 11),)
    assert runs_of(blocks, 12, BLOCK) == (CellRun(8, 12),)
    assert runs_of(blocks, 15, BLOCK) == (CellRun(8, 12), CellRun(28, 3))
    assert runs_of(blocks, 26, BLOCK) == (CellRun(8, 12), CellRun(28, 4), CellRun(36, 10))
    assert runs_of(blocks, 1, BLOCK) == (CellRun(8, 1),)


def test_a_long_prompt_has_a_short_recipe() -> None:
    blocks = np.arange(512, dtype=np.int32)
    recipe = MaskRecipe(512, 32768, None, (MaskRows(0, 512, runs_of(blocks, 32768, 64)),))
    assert (recipe.n_bytes, len(recipe.packed)) == (32 << 20, 36)


def test_a_built_mask_cannot_be_changed_by_accident() -> None:
    mask = MaskRecipe(1, 4, None, (MaskRows(0, 1, (CellRun(0, 2),)),)).array
    with pytest.raises(ValueError, match="read-only"):
        mask[0, 0] = 1


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


GOOD = (3, 8, 0, 1, 1, 2, 2, 0, 2, 4, 1)


def test_a_recipe_as_it_travels() -> None:
    rows = MaskRows(1, 2, (CellRun(0, 2), CellRun(4, 1)))
    assert MaskRecipe.unpack(memoryview(words(*GOOD))) == MaskRecipe(3, 8, None, (rows,))
    assert MaskRecipe.unpack(memoryview(words(3, 8, 5, 0))) == MaskRecipe(3, 8, 5, ())


def but(**changed: int) -> bytes:
    """The good recipe with words changed."""
    values = list(GOOD)
    for at, value in changed.items():
        values[int(at[1:])] = value
    return words(*values)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "0 bytes are no recipe"),
        (words(3, 8, 0), "12 bytes are no recipe"),
        (words(*GOOD) + b"x", "45 bytes are no recipe"),
        (bytes(MAX_PACKED_BYTES + 4), f"of {MAX_PACKED_BYTES + 4} bytes, at most"),
        (but(w0=0), "a mask of 0 rows"),
        (but(w0=MAX_ROWS + 1), "a mask of 65537 rows"),
        (but(w1=0), "rows and 0 cells"),
        (but(w1=MAX_CELLS + 1), "rows and 16777217 cells"),
        (but(w3=2), "ends in the middle of a sequence"),
        (but(w3=0xFFFFFFFF), "ends in the middle of a sequence"),
        (but(w3=0), "28 bytes follow"),
        (words(*GOOD, 0), "4 bytes follow"),
        (but(w4=2), "2 rows from 2 on, but must have some of rows 0 to 3"),
        (but(w5=0), "0 rows from 1 on"),
        (but(w5=3), "3 rows from 1 on"),
        (but(w5=0xFFFFFFFF), "4294967295 rows from 1 on"),
        (but(w6=3), "announces 3 runs of cells"),
        (but(w6=0xFFFFFFFF), "announces 4294967295 runs"),
        (but(w6=1), "8 bytes follow"),
        (words(3, 8, 0, 1, 1, 2, 0), "2 rows, but 0 cells"),
        (but(w8=0), "a run of 0 cells from 0 on"),
        (but(w8=5), "a run of 1 cells from 4 on, but it must be some of cells 5 to 8"),
        (but(w9=1), "from 1 on, but it must be some of cells 2 to 8"),
        (but(w9=8), "a run of 1 cells from 8 on"),
        (but(w10=5), "a run of 5 cells from 4 on"),
        (but(w10=0xFFFFFFFF), "a run of 4294967295 cells"),
        (words(3, 8, 0, 1, 0, 3, 1, 0, 2), "3 rows, but 2 cells"),
        (words(3, 8, 0, 2, 0, 2, 1, 0, 2, 1, 1, 1, 0, 1), "1 rows from 1 on, but must have some of rows 2 to 3"),
    ],
)
def test_a_recipe_that_nobody_has_made_is_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MaskRecipe.unpack(memoryview(packed))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 9), st.sampled_from([16, 600, (1 << 32) - 1])), max_size=24))
def test_what_is_not_refused_can_be_built(values: list[int]) -> None:
    try:
        recipe = MaskRecipe.unpack(memoryview(words(*values)))
    except ValueError:
        return
    assert recipe.packed == words(*values)
    assert set(np.unique(recipe.array)) <= {VISIBLE, HIDDEN}
