"""Tensors and ops as data: ggml's op set, without memory and without a device.

A `Tensor` is a leaf (a weight, a cache, an input; op NONE) or the result of an op on other tensors. `Graph` collects
nodes in the order in which they take effect. Nothing here knows where bytes live; `plan` gives every owner of memory
a place and turns a graph into a `Program`. Shapes follow ggml: `ne[0]` varies fastest; strides `nb` are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.engine.ggml import (
    VIEW_OPS,
    GGMLType,
    Op,
    Shape,
    TensorFlag,
    contiguous_strides,
    tensor_bytes,
)


def shape4(dims: Sequence[int]) -> Shape:
    """Up to four extents, padded with ones."""
    if not 1 <= len(dims) <= 4:
        raise ValueError(f"a tensor has one to four dimensions, got {len(dims)}")
    padded = (*dims, 1, 1, 1)
    return (padded[0], padded[1], padded[2], padded[3])


@dataclass(slots=True, eq=False)
class Tensor:
    """A leaf or the result of an op.

    `view_src` is the tensor that owns the memory (never itself a view) and `view_offs` the byte offset from its start;
    ops that write into another tensor's memory (SET_ROWS, CPY, in-place forms) carry one too.
    `params` are 16 little-endian 32-bit words as ggml's op_params.
    """

    type: GGMLType
    ne: Shape
    nb: Shape
    op: Op = Op.NONE
    params: tuple[int, ...] = ()
    src: tuple[Tensor | None, ...] = ()
    view_src: Tensor | None = None
    view_offs: int = 0
    flags: TensorFlag = TensorFlag.NONE
    name: str = ""

    @property
    def n_elements(self) -> int:
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def n_bytes(self) -> int:
        """Bytes this tensor spans; gaps of a strided view included."""
        return tensor_bytes(self.type, self.ne, self.nb)

    @property
    def owner(self) -> Tensor:
        """The tensor whose memory this one lies in: itself, unless it is a view."""
        return self if self.view_src is None else self.view_src

    @property
    def is_view_op(self) -> bool:
        return self.op in VIEW_OPS

    def __repr__(self) -> str:
        dims = "x".join(map(str, self.ne))
        return f"<{self.op.name} {self.name or '?'} {self.type.name}[{dims}]>"


def leaf(type_: GGMLType, dims: Sequence[int], name: str, flags: TensorFlag = TensorFlag.NONE) -> Tensor:
    """A tensor that no op makes: a weight, a cache or an input."""
    ne = shape4(dims)
    return Tensor(type_, ne, contiguous_strides(type_, ne), flags=flags, name=name)


@dataclass(slots=True)
class Graph:
    """Nodes in the order in which they take effect, and the leaves they reach."""

    nodes: list[Tensor] = field(default_factory=list)

    def add(self, node: Tensor) -> Tensor:
        """Append a node; it will be computed unless its op only renames memory."""
        if node.op not in VIEW_OPS:
            node.flags |= TensorFlag.COMPUTE
        self.nodes.append(node)
        return node

    def effects(self) -> Graph:
        """Only the nodes that bear on what outlives the run: writes into leaves, such as caches, and what they need."""
        made = {id(node) for node in self.nodes}
        writes: dict[int, list[Tensor]] = {}  # by owner
        for node in self.nodes:
            if node.view_src is not None and not node.is_view_op:
                writes.setdefault(id(node.view_src), []).append(node)
        found = [node for owner, nodes in writes.items() if owner not in made for node in nodes]
        needed: set[int] = set()
        while found:
            node = found.pop()
            if id(node) in needed or id(node) not in made:
                continue
            needed.add(id(node))
            found += [source for source in (*node.src, node.view_src) if source is not None]
            found += writes.get(id(node), ())
        return Graph([node for node in self.nodes if id(node) in needed])

    def use_counts(self) -> dict[int, int]:
        """How many (node, source) pairs read each tensor, by `id()`."""
        counts: dict[int, int] = {}
        for node in self.nodes:
            for source in node.src:
                if source is not None:
                    counts[id(source)] = counts.get(id(source), 0) + 1
        return counts
