"""Which snapshots of recurrent state exist, where in the prefix tree they belong, and which one goes first.

A snapshot is an opaque id; the bytes lie on the devices that own the layers. Ids are rows 0 .. n-1 of a region there,
used again in lane order: a restore submitted before a new take still reads the old bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from app.errors import InternalError

if TYPE_CHECKING:
    from app.engine.serving.nodes import Node


class SnapshotStore:
    """At most `n_snapshots` snapshots, least recently used first out.

    A snapshot of the state after position p hangs at the tree node that ends at the last multiple of 64 below p, keyed
    by the tokens from there to p; so it does not depend on which block happens to hold those tokens.
    """

    def __init__(self, n_snapshots: int) -> None:
        self.n_snapshots = n_snapshots
        self._places: OrderedDict[int, tuple[Node, tuple[int, ...]]] = OrderedDict()
        self._free = list(range(n_snapshots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._places)

    def put(self, node: Node, tokens: tuple[int, ...]) -> int | None:
        """An id for the state after `tokens` beyond `node`; None when there is one already, or no budget at all."""
        known = node.marks.get(tokens)
        if known is not None:
            self._places.move_to_end(known)
            return None
        if self.n_snapshots == 0:
            return None
        if not self._free:
            oldest, (owner, key) = self._places.popitem(last=False)
            del owner.marks[key]
            self._free.append(oldest)
        snapshot = self._free.pop()
        node.marks[tokens] = snapshot
        self._places[snapshot] = (node, tokens)
        return snapshot

    def touch(self, snapshot: int) -> None:
        """It was used just now."""
        self._places.move_to_end(snapshot)

    def drop(self, node: Node, tokens: tuple[int, ...]) -> None:
        """Forget one snapshot."""
        snapshot = node.marks.pop(tokens)
        del self._places[snapshot]
        self._free.append(snapshot)

    def forget(self, node: Node) -> None:
        """The node leaves the tree, and its snapshots with it."""
        for tokens in list(node.marks):
            self.drop(node, tokens)

    def check_integrity(self) -> None:
        ids = sorted([*self._free, *self._places])
        if ids != list(range(self.n_snapshots)):
            raise InternalError(f"snapshot ids are lost or doubled: {ids}")
        for snapshot, (node, tokens) in self._places.items():
            if node.marks.get(tokens) != snapshot:
                raise InternalError(f"snapshot {snapshot} is not where the store believes it to be")
            if not node.is_alive:
                raise InternalError(f"snapshot {snapshot} hangs at a node that left the tree")
