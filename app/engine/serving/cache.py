"""Sequences and memory: joining a cached prefix, reserving blocks, publishing what is submitted, leaving.

Ties the block pool, the prefix tree and the snapshots together and collects the device work they ask for. Everything
counts as done once it is submitted, because each lane does things in order: a block or slot freed here may be given
away at once, also while ubatches that use it are in flight.
"""

from __future__ import annotations

from app.engine.serving.kv import Block, BlockPool
from app.engine.serving.nodes import Match
from app.engine.serving.prefix import PrefixTree
from app.engine.serving.sequence import Sequence
from app.engine.serving.snapshots import SnapshotStore
from app.engine.serving.types import SchedulerConfig, StateAction, StateOp, blocks_for
from app.errors import InternalError


class KvCache:
    """All KV and recurrent state of one engine, as bookkeeping."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.n_blocks)
        self.snapshots = SnapshotStore(config.n_snapshots)
        self.tree = PrefixTree(self.pool, self.snapshots)
        self._before: list[StateOp] = []

    def match(self, sequence: Sequence) -> Match | None:
        """What the cache has of a sequence's tokens; None when it does not want to know."""
        if not sequence.is_caching:
            return None
        return self.tree.lookup(sequence.namespace, sequence.tokens, sequence.match_limit)

    def n_blocks_needed(self, sequence: Sequence, match: Match | None) -> int:
        """Blocks that joining and computing all known tokens would take away from others."""
        needed = blocks_for(sequence.n_known)
        if match is None:
            return needed
        return needed - sum(node.block is not None and node.block.n_holders > 0 for node in match.nodes)

    def join(self, sequence: Sequence, match: Match | None) -> None:
        """Start a sequence that has its slot at what the cache has: share, take over or copy; restore its state."""
        sequence.forget_indices()
        if match is not None:
            self._share(sequence, match)
        sequence.n_scheduled = sequence.n_kv
        if self.config.recurrent:
            self._restore(sequence, match)

    def reserve(self, sequence: Sequence, n_tokens: int, *, last_resort: bool) -> bool:
        """See to blocks for the first `n_tokens` positions; False when memory does not suffice for now."""
        n_missing = blocks_for(n_tokens) - len(sequence.blocks)
        if n_missing <= 0:
            return True
        last = sequence.blocks[-1] if sequence.blocks else None
        if not self.pool.make_room(last, n_missing, self.tree.evict_one, last_resort=last_resort):
            return False
        for _ in range(n_missing):
            last = self.pool.allocate(last)
            sequence.blocks.append(last)
        return True

    def advance(self, sequence: Sequence, n_rows: int) -> StateOp | None:
        """Rows have been submitted: publish their KV. Returns the snapshot to take after the run, if one is due."""
        sequence.n_scheduled += n_rows
        sequence.n_kv = max(sequence.n_kv, sequence.n_scheduled)
        if sequence.tail is None or not sequence.tail.is_attached:
            return None
        self.tree.advance(sequence.tail, sequence.tokens, sequence.n_kv, sequence.blocks)
        if sequence.n_scheduled in sequence.cuts:
            return self._take(sequence)
        return None

    def leave(self, sequence: Sequence) -> None:
        """A sequence gives up its memory (it ended or must wait); what it computed stays cached while memory lasts.

        Its slot's state is kept as a snapshot, taken before the next ubatch, hence before the slot's next user.
        """
        take = self._take(sequence) if self.config.recurrent and sequence.n_scheduled > 0 else None
        if take is not None:
            self._before.append(take)
        node = self.tree.finish(sequence.tail) if sequence.tail is not None else None
        for block in sequence.blocks:
            self.pool.drop(block)
        if node is not None:
            self.tree.released(node)
        sequence.blocks = []
        sequence.tail = None
        sequence.n_kv = sequence.n_scheduled = 0

    def take_before(self) -> tuple[StateOp, ...]:
        """State moves collected since the last call; they run before the next ubatch."""
        before, self._before = tuple(self._before), []
        return before

    def check_integrity(self, running: list[Sequence]) -> None:
        """Pool, tree and snapshots, and that holders and counts agree."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        held: dict[int, int] = {}
        for sequence in running:
            _check_sequence(sequence)
            for block in sequence.blocks:
                held[block.index] = held.get(block.index, 0) + 1
        for block in self.pool.blocks():
            if block.n_holders != held.get(block.index, 0):
                raise InternalError(f"{block!r} is really held by {held.get(block.index, 0)} sequences")
        attached = {id(s.tail) for s in running if s.tail is not None and s.tail.is_attached}
        if attached != {id(tail) for tail in self.tree.tails()}:
            raise InternalError("the tree's tails are not those of the running sequences")

    def _share(self, sequence: Sequence, match: Match) -> None:
        self.tree.use(match)
        blocks = [node.block for node in match.nodes if node.block is not None]
        for block in blocks:
            self.pool.hold(block)
        part = self._own_part(match, blocks[-1] if blocks else None)
        if part is not None:
            blocks.append(part)
        sequence.blocks = blocks
        sequence.n_kv = match.n_tokens if part is not None else match.end.depth
        tail_tokens = sequence.tokens[match.end.depth : sequence.n_kv]
        sequence.tail = self.tree.attach(match.end, tail_tokens, part)

    def _own_part(self, match: Match, last: Block | None) -> Block | None:
        """A block of the sequence's own with the match's last, partly filled stretch; None if there is no room."""
        if match.part is None:
            return None
        if match.leaf is not None:
            return self.tree.take_over(match.leaf)
        source = match.part.block
        assert source is not None
        self.pool.hold(source)  # not to be evicted before the copy is on its way
        block = None
        if self.pool.make_room(last, 1, self.tree.evict_one, last_resort=True):
            block = self.pool.allocate(last)
            self.pool.copy(source, block, match.n_tail)
        self.pool.drop(source)
        self.tree.unpinned(match.part)
        return block

    def _restore(self, sequence: Sequence, match: Match | None) -> None:
        """Bring the slot's state to the nearest snapshot the sequence's KV reaches, else to the start."""
        if match is not None and match.snapshot_at > sequence.n_kv:
            match = self.tree.lookup(sequence.namespace, sequence.tokens, sequence.n_kv)
        if match is not None and match.snapshot >= 0:
            sequence.n_scheduled = match.snapshot_at
            self._before.append(StateOp(StateAction.RESTORE, sequence.slot, match.snapshot))
        else:
            sequence.n_scheduled = 0
            self._before.append(StateOp(StateAction.CLEAR, sequence.slot))

    def _take(self, sequence: Sequence) -> StateOp | None:
        if sequence.tail is None or not sequence.tail.is_attached:
            return None
        snapshot = self.tree.mark(sequence.tail, sequence.tokens, sequence.n_scheduled)
        return None if snapshot is None else StateOp(StateAction.TAKE, sequence.slot, snapshot)


def _check_sequence(sequence: Sequence) -> None:
    """A running sequence's blocks against its counts and its path in the tree."""
    indices = [block.index for block in sequence.blocks]
    if any(a >= b for a, b in zip(indices, indices[1:], strict=False)) or (indices and indices[0] < 0):
        raise InternalError(f"the blocks of request {sequence.id} do not increase: {indices}")
    if not sequence.n_scheduled <= sequence.n_kv <= sequence.n_known or blocks_for(sequence.n_kv) > len(indices):
        raise InternalError(
            f"request {sequence.id} has {sequence.n_scheduled} rows submitted, {sequence.n_kv} cached, "
            f"{sequence.n_known} tokens and {len(indices)} blocks"
        )
    tail = sequence.tail
    if tail is None:
        return
    if tail.is_attached and tail.parent.depth + len(tail.tokens) != sequence.n_kv:
        raise InternalError(f"request {sequence.id} has published {tail.parent.depth} + {len(tail.tokens)} tokens")
    node, place = tail.parent, blocks_for(tail.parent.depth)
    if tail.is_attached and tail.tokens and (tail.block is not sequence.blocks[place] or tail.block.cached):
        raise InternalError(f"the tail of request {sequence.id} lies in a block that is not its own")
    while node.parent is not None:
        place -= 1
        if node.block is not sequence.blocks[place] or tuple(sequence.tokens[: node.depth][-64:]) != node.tokens:
            raise InternalError(f"request {sequence.id} is attached to a path that is not its own")
        node = node.parent
