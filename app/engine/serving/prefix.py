"""The prefix tree: which token prefixes have their KV in the pool, of requests running and finished.

A node is one block: 64 tokens, or fewer in a leaf. Children of a node are keyed by their tokens and none is a prefix of
another, so the best match of a query is a neighbour of its place in the sorted keys. What a running sequence has
submitted beyond its last full block hangs at that node as a `Tail`: others may copy from it, only its owner appends.

Sharing: full blocks are shared by reference; a partly filled one belongs to the tree or to its one writer, and whoever
matches a part of it copies that part. Invariants: indices of blocks strictly increase from the root down; a sequence
that is attached to the tree holds exactly the blocks of its path (and its own tail's).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from app.engine.serving.kv import Block, BlockPool
from app.engine.serving.nodes import (
    Match,
    Node,
    Tail,
    Tokens,
    best_part,
    check_node,
    common,
    nearest_snapshot,
    prefix_of,
    starting_with,
)
from app.engine.serving.snapshots import SnapshotStore
from app.engine.serving.types import BLOCK_CELLS
from app.errors import InternalError


class PrefixTree:
    """The tree over one pool; `snapshots` holds the state that goes with some of its positions."""

    def __init__(self, pool: BlockPool, snapshots: SnapshotStore) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._queue: list[tuple[int, int, Node]] = []  # heap of leaves by last use; stale entries are skipped
        self._n_dead = 0  # entries of nodes that left the tree by another way
        self._ties = count()

    def lookup(self, namespace: str, tokens: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of tokens[:limit]. Changes nothing but the tree's idea of what a root is."""
        node = root = self._root(namespace)
        path: list[Node] = []
        while node.depth + BLOCK_CELLS <= limit:
            child = node.children.get(tuple(tokens[node.depth : node.depth + BLOCK_CELLS]))
            if child is None:
                break
            path.append(child)
            node = child
        rest = tuple(tokens[node.depth : min(limit, node.depth + BLOCK_CELLS)])
        n, part = best_part(node, rest)
        snapshot, at = nearest_snapshot(node, rest[:n]) if self.snapshots.n_snapshots else (-1, 0)
        return Match(root, tuple(path), n, part, snapshot, at)

    def use(self, match: Match) -> None:
        """The match is being used: its nodes and its snapshot are the most recent ones."""
        self._touch(match.end)
        if isinstance(match.part, Node):
            match.part.used = self._clock
        if match.snapshot >= 0:
            self.snapshots.touch(match.snapshot)

    def attach(self, node: Node, tail_tokens: Sequence[int], block: Block | None) -> Tail:
        """A sequence starts at `node`, with the part of a block it copied or took over as its tail."""
        tail = Tail(node, list(tail_tokens), block)
        node.tails.append(tail)
        return tail

    def take_over(self, leaf: Node) -> Block:
        """Remove a partly filled leaf; its block now belongs to the caller, who holds it once."""
        assert leaf.block is not None and leaf.parent is not None
        self.pool.hold(leaf.block)
        self._unlink(leaf)
        return leaf.block

    def advance(self, tail: Tail, tokens: Sequence[int], n_kv: int, blocks: list[Block]) -> bool:
        """The sequence has submitted its KV up to position `n_kv`; publish it, block by block.

        A whole block that the tree already has from somewhere else is exchanged for that one (in `blocks` too), so
        that the copy is freed. Where the order of indices forbids it, the tail is detached and False returned.
        """
        while n_kv - tail.parent.depth >= BLOCK_CELLS:
            start = tail.parent.depth
            key = tuple(tokens[start : start + BLOCK_CELLS])
            child = tail.parent.children.get(key)
            if child is None:
                child = self._grow(tail.parent, key, blocks[start // BLOCK_CELLS])
            elif not self._exchange(child, start // BLOCK_CELLS, blocks):
                self.detach(tail)
                self._prune_marks(tail.parent)
                return False
            tail.parent.tails.remove(tail)
            child.tails.append(tail)
            tail.parent, tail.tokens = child, []
        start = tail.parent.depth + len(tail.tokens)
        tail.tokens.extend(tokens[start:n_kv])
        tail.block = blocks[tail.parent.depth // BLOCK_CELLS] if tail.tokens else None
        return True

    def detach(self, tail: Tail) -> None:
        """The sequence goes on without the tree; what it published stays."""
        tail.parent.tails.remove(tail)
        tail.is_attached = False

    def finish(self, tail: Tail) -> Node:
        """The sequence ends: its tail becomes a leaf, unless the tree has as much.

        Returns the end of its path: the caller drops the sequence's blocks and then calls `released` with it.
        """
        if not tail.is_attached:
            return tail.parent
        parent = tail.parent
        self.detach(tail)
        self._touch(parent)
        if not tail.tokens:
            return parent
        assert tail.block is not None
        key = tuple(tail.tokens)
        longer = starting_with(parent.keys, key)
        leaf = self._grow(parent, key, tail.block) if longer is None else parent.children[longer]
        leaf.used = self._clock
        return leaf

    def released(self, node: Node) -> None:
        """A sequence has dropped the blocks of the path that ends at `node`; it may be evictable now."""
        self._offer(node)

    def unpinned(self, part: Node | Tail) -> None:
        """A block that was held for a moment is not any more; its leaf may have been passed over in between."""
        if isinstance(part, Node):
            self._offer(part)

    def mark(self, tail: Tail, tokens: Sequence[int], position: int) -> int | None:
        """An id for a snapshot of the state after `position` tokens of an attached sequence; None when not needed."""
        node = tail.parent
        while node.depth >= position and node.parent is not None:
            node = node.parent
        return self.snapshots.put(node, tuple(tokens[node.depth : position]))

    def evict_one(self) -> bool:
        """Forget the least recently used leaf that no sequence holds. False when there is none."""
        while self._queue:
            used, _, node = heappop(self._queue)
            node.is_queued = False
            self._n_dead -= not node.is_alive
            if not node.is_evictable:
                continue  # it comes back when its last child goes or its last holder leaves
            if node.used != used:
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            self._unlink(node)
            self._prune_marks(parent)
            self._offer(parent)
            return True
        return False

    def nodes(self) -> Iterator[Node]:
        """Every node with a block, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.block is not None:
                yield node
            stack.extend(node.children.values())

    def tails(self) -> Iterator[Tail]:
        for root in self._roots.values():
            yield from root.tails
        for node in self.nodes():
            yield from node.tails

    def check_integrity(self) -> None:
        seen: set[int] = set()
        for node in self.nodes():
            check_node(node)
            assert node.block is not None
            if id(node.block) in seen:
                raise InternalError(f"{node.block!r} belongs to two nodes")
            seen.add(id(node.block))
        n_cached = sum(block.cached for block in self.pool.blocks())
        if n_cached != len(seen):
            raise InternalError(f"{n_cached} blocks say the tree holds them, it has {len(seen)}")
        queued = {id(node) for _, _, node in self._queue}
        for node in self.nodes():
            if node.is_queued != (id(node) in queued) or (node.is_evictable and not node.is_queued):
                raise InternalError(f"the leaf of {node.block!r} can never be evicted")
        if self._n_dead != sum(not node.is_alive for _, _, node in self._queue):
            raise InternalError(f"{self._n_dead} dead entries are counted in the eviction queue")
        for node in (*self._roots.values(), *self.nodes()):
            if not all(_has_kv(node, key) for key in node.marks):
                raise InternalError("a snapshot is kept whose KV is not")
        self.snapshots.check_integrity()

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, (), None)
        return root

    def _touch(self, node: Node) -> None:
        """Mark the path to `node` as used now."""
        self._clock += 1
        step: Node | None = node
        while step is not None:
            step.used = self._clock
            step = step.parent

    def _grow(self, parent: Node, key: Tokens, block: Block) -> Node:
        """Add a child; a shorter leaf that says the same goes."""
        shorter = prefix_of(parent.keys, key)
        if shorter is not None:
            self._unlink(parent.children[shorter])
        node = Node(parent, key, block)
        node.used = self._clock
        parent.children[key] = node
        insort(parent.keys, key)
        self.pool.cache(block)
        return node

    def _exchange(self, child: Node, place: int, blocks: list[Block]) -> bool:
        """Let a sequence use the tree's block at `place` instead of its own, if its next block lies above it."""
        assert child.block is not None
        if blocks[place] is child.block:
            return True
        if place + 1 < len(blocks) and blocks[place + 1].index <= child.block.index:
            return False
        own, blocks[place] = blocks[place], child.block
        self.pool.hold(child.block)
        self.pool.drop(own)
        self.pool.generation += 1
        child.used = self._clock
        return True

    def _unlink(self, node: Node) -> None:
        """Take a leaf out of the tree and let its block go."""
        assert node.parent is not None and node.block is not None and not node.children and not node.tails
        del node.parent.children[node.tokens]
        del node.parent.keys[bisect_left(node.parent.keys, node.tokens)]
        node.is_alive = False
        if node.is_queued:
            self._n_dead += 1
            self._tidy()
        self.snapshots.forget(node)
        self.pool.uncache(node.block)

    def _prune_marks(self, node: Node) -> None:
        """Forget snapshots whose tokens no child has any more: without their KV they are of no use."""
        for key in [key for key in node.marks if not _has_kv(node, key)]:
            self.snapshots.drop(node, key)

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it can be evicted now."""
        if node.is_evictable and not node.is_queued:
            node.is_queued = True
            heappush(self._queue, (node.used, next(self._ties), node))

    def _tidy(self) -> None:
        """Rebuild the queue when most of it is dead; else it would grow for as long as nothing is evicted."""
        if self._n_dead < 64 or 2 * self._n_dead < len(self._queue):
            return
        self._queue = [entry for entry in self._queue if entry[2].is_alive]
        heapify(self._queue)
        self._n_dead = 0


def _has_kv(node: Node, tokens: Tokens) -> bool:
    """Whether the tree has the KV of `tokens` beyond `node`."""
    if starting_with(node.keys, tokens) is not None:
        return True
    return any(common(tail.tokens, tokens) == len(tokens) for tail in node.tails)
