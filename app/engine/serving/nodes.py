"""What the prefix tree is made of: nodes of a block each, tails of running sequences, and the answer to a lookup."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.engine.serving.kv import Block
from app.engine.serving.types import BLOCK_CELLS
from app.errors import InternalError

Tokens = tuple[int, ...]


class Node:
    """A block's worth of tokens whose KV is cached. Roots have neither tokens nor block, one per namespace."""

    __slots__ = (
        "block",
        "children",
        "depth",
        "is_alive",
        "is_queued",
        "keys",
        "marks",
        "parent",
        "tails",
        "tokens",
        "used",
    )

    def __init__(self, parent: Node | None, tokens: Tokens, block: Block | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.depth: int = len(tokens) + (parent.depth if parent else 0)  # position after the last token
        self.children: dict[Tokens, Node] = {}
        self.keys: list[Tokens] = []  # of the children, sorted
        self.tails: list[Tail] = []
        self.marks: dict[Tokens, int] = {}  # snapshots up to one block beyond this node
        self.used = 0
        self.is_alive = True
        self.is_queued = False  # has an entry in the eviction queue

    @property
    def is_evictable(self) -> bool:
        return (
            self.is_alive
            and self.block is not None
            and self.block.n_holders == 0
            and not self.children
            and not self.tails
        )


@dataclass(slots=True, eq=False)
class Tail:
    """The end of a running sequence: fewer than 64 submitted tokens beyond `parent`, in a block of its own (if any)."""

    parent: Node
    tokens: list[int] = field(default_factory=list)
    block: Block | None = None
    is_attached: bool = True


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree has of a query. `nodes` are whole blocks; `n_tail` further tokens stand in the block of `part`.

    `snapshot` and `snapshot_at` name the nearest state at or before the end of the match (-1 and 0: none).
    """

    root: Node
    nodes: tuple[Node, ...]
    n_tail: int = 0
    part: Node | Tail | None = None
    snapshot: int = -1
    snapshot_at: int = 0

    @property
    def end(self) -> Node:
        """The last whole node, or the root."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def n_tokens(self) -> int:
        return self.end.depth + self.n_tail

    @property
    def leaf(self) -> Node | None:
        """The partly filled leaf that is matched as a whole: it may be appended to instead of copied."""
        if isinstance(self.part, Node) and len(self.part.tokens) == self.n_tail < BLOCK_CELLS:
            return self.part
        return None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens agree."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def starting_with(keys: list[Tokens], prefix: Tokens) -> Tokens | None:
    """A key that starts with `prefix` (or is it)."""
    at = bisect_left(keys, prefix)
    if at < len(keys) and keys[at][: len(prefix)] == prefix:
        return keys[at]
    return None


def prefix_of(keys: list[Tokens], key: Tokens) -> Tokens | None:
    """The key that is a proper prefix of `key`. No key is a prefix of another, so it is the one just before."""
    at = bisect_left(keys, key) - 1
    if at >= 0 and key[: len(keys[at])] == keys[at]:
        return keys[at]
    return None


def best_part(node: Node, rest: Tokens) -> tuple[int, Node | Tail | None]:
    """The child or tail that shares most of `rest`, and how much; rather one that may be taken over than copied."""
    best: int = 0
    part: Node | Tail | None = None
    if not rest:
        return best, part
    for tail in node.tails:
        n = common(tail.tokens, rest)
        if n > best:
            best, part = n, tail
    at = bisect_left(node.keys, rest)
    for key in node.keys[max(0, at - 1) : at + 1]:
        n = common(key, rest)
        if n > best or (n == best == len(key) < BLOCK_CELLS):
            best, part = n, node.children[key]
    return best, part


def nearest_snapshot(node: Node, part: Tokens) -> tuple[int, int]:
    """The deepest snapshot on the path that ends `part` beyond `node`: its id and position; (-1, 0) if none."""
    step = node
    while True:
        n = max((len(key) for key in step.marks if part[: len(key)] == key), default=0)
        if n:
            return step.marks[part[:n]], step.depth + n
        if step.parent is None:
            return -1, 0
        step, part = step.parent, step.tokens


def check_node(node: Node) -> None:
    parent, block = node.parent, node.block
    if parent is None or block is None or not node.is_alive:
        raise InternalError("a dead node is still linked in the prefix tree")
    if not block.cached or block.index < 0:
        raise InternalError(f"{block!r} is in the prefix tree but does not know it")
    if parent.block is not None and parent.block.index >= block.index:
        raise InternalError(f"{block!r} does not lie above its parent's {parent.block!r}")
    if node.depth != parent.depth + len(node.tokens) or not 1 <= len(node.tokens) <= BLOCK_CELLS:
        raise InternalError(f"a node of {len(node.tokens)} tokens ends at {node.depth}, its parent at {parent.depth}")
    if len(node.tokens) < BLOCK_CELLS and (node.children or node.tails or block.n_holders):
        raise InternalError(f"the partly filled {block!r} is used as if it were whole")
    if sorted(node.children) != node.keys:
        raise InternalError("a node's sorted keys are not those of its children")
    if any(b[: len(a)] == a for a, b in zip(node.keys, node.keys[1:], strict=False)):
        raise InternalError("a child's tokens are a prefix of another child's")
    if parent.block is not None and parent.block.n_holders < block.n_holders:
        raise InternalError(f"{block!r} has more holders than its parent's {parent.block!r}")
