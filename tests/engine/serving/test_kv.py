"""The block pool: lowest first, never out of order, and slides that move no more than they must, piece by piece."""

from __future__ import annotations

import random

import pytest

from app.engine.serving.kv import Block, BlockPool
from app.engine.serving.types import BLOCK_CELLS
from app.errors import InternalError


def never() -> bool:
    return False


def filled(n_blocks: int, *, free: tuple[int, ...] = ()) -> tuple[BlockPool, list[Block]]:
    """A pool whose blocks are all held, except for those listed."""
    pool = BlockPool(n_blocks)
    blocks: list[Block] = []
    for _ in range(n_blocks):
        blocks.append(pool.allocate(blocks[-1] if blocks else None))
    kept = [b for b in blocks if b.index not in free]
    for block in blocks:
        if block.index in free:
            pool.drop(block)
    return pool, kept


def replay(pool: BlockPool, n_blocks: int) -> list[int]:
    """Run the pool's copies over cells that hold their own number; check each piece."""
    cells = list(range(n_blocks * BLOCK_CELLS))
    for copy in pool.take_copies():
        assert copy.n_cells > 0 and abs(copy.source_cell - copy.target_cell) >= copy.n_cells
        cells[copy.target_cell : copy.target_cell + copy.n_cells] = cells[
            copy.source_cell : copy.source_cell + copy.n_cells
        ]
    return cells


def test_low_blocks_come_first_and_always_above_the_last() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(None), pool.allocate(None)
    third = pool.allocate(second)
    assert [b.index for b in (first, second, third)] == [0, 1, 2]
    pool.drop(first)
    assert pool.allocate(third).index == 3
    assert pool.allocate(None).index == 0
    assert pool.n_free_above(third) == pool.n_free == 4


def test_nothing_above_is_an_error_unless_room_was_made() -> None:
    pool, kept = filled(4, free=(0,))
    with pytest.raises(InternalError, match="room"):
        pool.allocate(kept[-1])
    assert pool.make_room(kept[-1], 1, never, last_resort=True)
    assert pool.allocate(kept[-1]).index == 3
    pool.check_integrity()


def test_a_slide_moves_every_block_to_its_place_and_no_piece_overlaps() -> None:
    rng = random.Random(1)
    for _ in range(100):
        n_blocks = rng.randint(2, 60)
        free = tuple(i for i in range(n_blocks) if rng.random() < 0.3)
        pool, kept = filled(n_blocks, free=free)
        before = [b.index for b in kept]
        goal = rng.randint(0, len(free))
        pool.slide(goal)
        pool.check_integrity()
        after = [b.index for b in kept]
        assert after == sorted(after) and pool.n_free == len(free)
        assert pool.n_free_above(kept[-1] if kept else None) >= goal
        cells = replay(pool, n_blocks)
        for old, block in zip(before, kept, strict=True):
            assert cells[block.first_cell] == old * BLOCK_CELLS
            assert cells[block.first_cell + BLOCK_CELLS - 1] == old * BLOCK_CELLS + BLOCK_CELLS - 1


def test_a_slide_leaves_alone_what_lies_below_the_holes_it_needs() -> None:
    pool, kept = filled(10, free=(1, 7))
    pool.slide(1)
    assert [b.index for b in kept] == [0, 2, 3, 4, 5, 6, 7, 8]
    assert pool.n_moved == 2
    assert pool.allocate(None).index == 1


def test_eviction_comes_before_sliding_and_frees_a_batch() -> None:
    pool, kept = filled(64)
    asked = 0

    def evict() -> bool:
        nonlocal asked
        asked += 1
        pool.drop(kept.pop())  # the highest
        return True

    assert pool.make_room(None, 1, evict, last_resort=True)
    assert asked == 1 + 64 // 16
    assert pool.take_copies() == ()


def test_a_slide_frees_an_eighth_when_it_can() -> None:
    pool, kept = filled(64)
    last = kept[-1]

    def evict() -> bool:
        pool.drop(kept.pop(0))  # the lowest: nothing above the last comes free
        return True

    assert pool.make_room(last, 1, evict, last_resort=True)
    assert pool.n_free_above(last) == 64 // 8
    assert last.index == 64 - 64 // 8 - 1
    assert sum(c.n_cells for c in pool.take_copies()) == pool.n_moved * BLOCK_CELLS == 56 * BLOCK_CELLS


def test_a_slide_that_frees_next_to_nothing_is_a_last_resort() -> None:
    pool, kept = filled(128, free=(0, 1))
    assert not pool.make_room(kept[-1], 1, never, last_resort=False)
    assert pool.take_copies() == ()
    assert pool.make_room(kept[-1], 1, never, last_resort=True)


def test_no_room_is_said_and_nothing_changes() -> None:
    pool, kept = filled(16, free=(3,))
    assert not pool.make_room(kept[-1], 2, never, last_resort=True)
    assert pool.take_copies() == () and pool.n_free == 1


def test_bookkeeping_that_is_broken_is_found() -> None:
    pool, kept = filled(4, free=(2,))
    pool.check_integrity()
    kept[0].n_holders = 0
    with pytest.raises(InternalError, match="leaked"):
        pool.check_integrity()
    kept[0].n_holders = 1
    pool.n_held += 1
    with pytest.raises(InternalError, match="held"):
        pool.check_integrity()
    pool.n_held -= 1
    with pytest.raises(InternalError, match="more often"):
        pool.drop(kept[0]), pool.drop(kept[0])
