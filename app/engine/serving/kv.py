"""The pool of KV blocks: who holds which, where they lie, and the copies that move them.

Two invariants let plain attention over a contiguous cache serve everyone: block k of a sequence holds its positions
[64k, 64k+64), and the block indices of every sequence strictly increase. So a new block comes from above the last one,
and when none is free there, live blocks slide downwards without changing their order.

A block is addressed by identity, not by index: sliding only changes `Block.index`, and every holder sees it at once.
Copies are collected in the order in which they must run; each lane is FIFO, so memory freed here may be given to the
next user at once: whatever still reads or writes it was submitted earlier and finishes earlier.
"""

from __future__ import annotations

from collections.abc import Callable

from app.engine.serving.types import BLOCK_CELLS, CopyCells
from app.errors import InternalError

#: A share of the pool that is evicted at once when blocks run out, so that low ones are there to start with.
EVICT_SHARE = 16
#: A share of the pool that one slide frees at the top. At most N - N/8 blocks move for N/8 handed out: 7 per block.
SLIDE_SHARE = 8
#: With less than this share free, sliding for every few blocks costs more than asking someone to leave.
THRASH_SHARE = 32


class Block:
    """64 cells. `n_holders` counts sequences, `cached` says whether the prefix tree holds it as well."""

    __slots__ = ("cached", "index", "n_holders")

    def __init__(self, index: int) -> None:
        self.index = index
        self.n_holders = 0
        self.cached = False

    @property
    def first_cell(self) -> int:
        return self.index * BLOCK_CELLS

    def __repr__(self) -> str:
        return f"<Block {self.index} held by {self.n_holders}{' and the tree' if self.cached else ''}>"


class BlockPool:
    """`n_blocks` blocks with indices 0 .. n_blocks-1; the scratch block behind them is not part of the pool."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.n_free = n_blocks
        self.n_held = 0  # blocks that at least one sequence holds; the other used ones are the tree's alone
        self.n_allocated = 0  # totals since the start
        self.n_moved = 0
        self.generation = 0  # grows whenever block indices kept elsewhere are out of date
        self._free = (1 << n_blocks) - 1  # bit i: block i is free
        self._blocks: list[Block | None] = [None] * n_blocks
        self._copies: list[CopyCells] = []

    @property
    def n_used(self) -> int:
        return self.n_blocks - self.n_free

    @property
    def n_evictable(self) -> int:
        """Blocks that only the prefix tree holds."""
        return self.n_used - self.n_held

    def n_free_above(self, last: Block | None) -> int:
        """Free blocks that may follow `last` in a sequence."""
        return self.n_free if last is None else (self._free >> (last.index + 1)).bit_count()

    def allocate(self, last: Block | None) -> Block:
        """The lowest free block above `last`, held once. The caller has made room."""
        shift = 0 if last is None else last.index + 1
        above = self._free >> shift
        if not above:
            raise InternalError("no free block above the last one; room must be made before allocating")
        index = shift + (above & -above).bit_length() - 1
        block = Block(index)
        block.n_holders = 1
        self._free &= ~(1 << index)
        self._blocks[index] = block
        self.n_free -= 1
        self.n_held += 1
        self.n_allocated += 1
        return block

    def hold(self, block: Block) -> None:
        """One more sequence holds this live block."""
        self.n_held += block.n_holders == 0
        block.n_holders += 1

    def drop(self, block: Block) -> None:
        """One sequence less; nobody left means free."""
        if block.n_holders < 1:
            raise InternalError(f"{block!r} was dropped more often than held")
        block.n_holders -= 1
        if block.n_holders == 0:
            self.n_held -= 1
            self._free_if_unused(block)

    def cache(self, block: Block) -> None:
        """The prefix tree holds this live block too."""
        if block.cached:
            raise InternalError(f"{block!r} is in the prefix tree already")
        block.cached = True

    def uncache(self, block: Block) -> None:
        """The prefix tree lets go."""
        if not block.cached:
            raise InternalError(f"{block!r} is not in the prefix tree")
        block.cached = False
        self._free_if_unused(block)

    def copy(self, source: Block, target: Block, n_cells: int) -> None:
        """Copy the first cells of a block (copy on write), in lane order with everything else."""
        self._copies.append(CopyCells(source.first_cell, target.first_cell, n_cells))

    def take_copies(self) -> tuple[CopyCells, ...]:
        """The copies collected since the last call; they run before the next ubatch's writes."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def make_room(self, last: Block | None, n: int, evict: Callable[[], bool], *, last_resort: bool) -> bool:
        """See to `n` free blocks above `last`: evict from the tree, then slide. False when that is not possible.

        `evict` frees at least one block that only the tree holds, or says False. Without `last_resort` a slide that
        frees too little to be worth its copies is refused as well.
        """
        if self.n_free_above(last) >= n:
            return True
        if self.n_free < max(n, self.n_blocks // EVICT_SHARE):
            self._evict_to(n + self.n_blocks // EVICT_SHARE, evict)
            if self.n_free_above(last) >= n:
                return True
        goal = max(n, self.n_blocks // SLIDE_SHARE)
        self._evict_to(goal, evict)
        if self.n_free_above(last) >= n:
            return True
        if self.n_free < n or (self.n_free < self.n_blocks // THRASH_SHARE and not last_resort):
            return False
        self.slide(min(goal, self.n_free))
        return True

    def slide(self, goal: int) -> None:
        """Move live blocks down, keeping their order, until the top `goal` blocks of the pool are free.

        Moves no more than it must: holes below the lowest one needed stay for sequences that start there.
        """
        start, n_holes = self.n_blocks, 0
        while n_holes < goal:
            start -= 1
            n_holes += self._blocks[start] is None
        target, source = start, start
        while source < self.n_blocks:
            if self._blocks[source] is None:
                source += 1
                continue
            end = source
            while end < self.n_blocks and self._blocks[end] is not None:
                end += 1
            self._move_run(source, end, target)
            target += end - source
            source = end
        below = self._free & ((1 << start) - 1)
        self._free = below | (((1 << self.n_blocks) - 1) >> target << target)
        self.generation += 1

    def blocks(self) -> list[Block]:
        """Live blocks by ascending index."""
        return [block for block in self._blocks if block is not None]

    def check_integrity(self) -> None:
        """Own bookkeeping only; who holds what is checked by those who hold."""
        live = self.blocks()
        for index, block in enumerate(self._blocks):
            free = bool(self._free >> index & 1)
            if free != (block is None):
                raise InternalError(f"block {index} is {'free' if free else 'used'} in the map but not in the table")
            if block is not None and block.index != index:
                raise InternalError(f"{block!r} stands in the table at {index}")
            if block is not None and not block.cached and block.n_holders == 0:
                raise InternalError(f"{block!r} has leaked: it is not free, but nobody holds it")
        if self.n_free != self.n_blocks - len(live):
            raise InternalError(f"{self.n_free} blocks are counted as free, {self.n_blocks - len(live)} are")
        n_held = sum(block.n_holders > 0 for block in live)
        if self.n_held != n_held:
            raise InternalError(f"{self.n_held} blocks are counted as held, {n_held} are")

    def _evict_to(self, n_free: int, evict: Callable[[], bool]) -> None:
        while self.n_free < n_free and self.n_free < self.n_blocks and evict():
            pass

    def _free_if_unused(self, block: Block) -> None:
        if block.cached or block.n_holders:
            return
        self._blocks[block.index] = None
        self._free |= 1 << block.index
        self.n_free += 1
        block.index = -1  # a stale reference must not look alive

    def _move_run(self, source: int, end: int, target: int) -> None:
        """Move adjacent live blocks [source, end) down to `target`, in pieces no longer than the shift."""
        shift = source - target
        if shift == 0:
            return
        for first in range(source, end, shift):
            n = min(shift, end - first)
            cells = CopyCells(first * BLOCK_CELLS, (first - shift) * BLOCK_CELLS, n * BLOCK_CELLS)
            self._copies.append(cells)
        for index in range(source, end):
            block = self._blocks[index]
            assert block is not None
            block.index = index - shift
            self._blocks[index - shift] = block
            self._blocks[index] = None
        self.n_moved += end - source
