"""From a stage's graph to a placed program: memory by lifetime, inputs at fixed places.

All programs of a stage share one scratch arena, reserved once at the largest shape. A layout is made for the largest
`n_kv` of a batch size and serves every smaller one, so programs of all shapes fit what was reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.engine.graph import Graph, Tensor
from app.engine.program import Buffer, PlacedTensor, Program
from app.errors import InternalError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor that owns memory stands."""

    buffer: Buffer
    offset: int


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """Offsets in the scratch arena by node index, and the bytes they need together.

    Node indices, not tensors, since graphs of the same batch size and another `n_kv` have the same nodes.
    """

    offsets: Mapping[int, int]
    sizes: Mapping[int, int]
    total_bytes: int


def align_up(n: int, alignment: int) -> int:
    return (n + alignment - 1) // alignment * alignment


def lay_out_scratch(
    graph: Graph,
    output: Tensor | None,
    alignment: int,
    size_of: Callable[[Tensor], int] = lambda tensor: tensor.n_bytes,
) -> ScratchLayout:
    """Give every node that owns memory a place, using the bytes of values that are no longer needed again.

    A result never overlaps a live value; the output, if there is one, stays to the end. `size_of` is what the device
    wants reserved.
    """
    owners = {id(node): index for index, node in enumerate(graph.nodes) if node.view_src is None}
    last_use = {index: index for index in owners.values()}
    for at, node in enumerate(graph.nodes):
        for tensor in (*node.src, node.view_src):
            if tensor is not None and id(tensor.owner) in owners:
                last_use[owners[id(tensor.owner)]] = at
    if output is not None:
        if id(output.owner) not in owners:
            raise InternalError(f"the output {output!r} of a stage is not a node of its graph")
        last_use[owners[id(output.owner)]] = len(graph.nodes)
    dying: dict[int, list[int]] = {}
    for index, at in last_use.items():
        dying.setdefault(at, []).append(index)

    arena = _Arena(alignment)
    offsets: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for at, node in enumerate(graph.nodes):
        if node.view_src is None:
            sizes[at] = align_up(max(size_of(node), 1), alignment)
            offsets[at] = arena.take(sizes[at])
        for index in dying.get(at, ()):
            arena.give(offsets[index], sizes[index])
    return ScratchLayout(offsets, sizes, arena.high_water)


class _Arena:
    """Best-fit allocation of offsets with merging of free neighbours."""

    def __init__(self, alignment: int) -> None:
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset, never adjacent
        self._alignment = alignment
        self.high_water = 0

    def take(self, size: int) -> int:
        fitting = [(have, offset, at) for at, (offset, have) in enumerate(self._free) if have >= size]
        if not fitting:
            return self._grow(size)
        have, offset, at = min(fitting)
        if have == size:
            del self._free[at]
        else:
            self._free[at] = (offset + size, have - size)
        return offset

    def give(self, offset: int, size: int) -> None:
        at = 0
        while at < len(self._free) and self._free[at][0] < offset:
            at += 1
        if at < len(self._free) and offset + size == self._free[at][0]:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            before = self._free.pop(at - 1)
            offset, size, at = before[0], before[1] + size, at - 1
        self._free.insert(at, (offset, size))

    def _grow(self, size: int) -> int:
        offset = self.high_water
        if self._free and sum(self._free[-1]) == self.high_water:  # the arena's end is free: grow only by what lacks
            offset = self._free.pop()[0]
        self.high_water = offset + size
        return offset


def make_program(
    name: str,
    graph: Graph,
    output: Tensor | None,
    leaves: Sequence[tuple[Tensor, Place]],
    scratch: Buffer,
    layout: ScratchLayout,
) -> Program:
    """Place a graph: leaves where they stand, nodes in the scratch arena, views inside their owners.

    Leaves that the graph does not reach are left out.
    Raises InternalError if the graph reaches a leaf without a place or a node outgrows the layout.
    """
    reached = {id(tensor) for node in graph.nodes for tensor in (*node.src, node.view_src) if tensor is not None}
    places: dict[int, Place] = {id(tensor): place for tensor, place in leaves}
    tensors: list[Tensor] = [tensor for tensor, _ in leaves if id(tensor) in reached]
    first_node = len(tensors)
    for at, node in enumerate(graph.nodes):
        if node.view_src is None:
            if node.n_bytes > layout.sizes[at]:
                raise InternalError(f"{name}: {node!r} needs {node.n_bytes} bytes, {layout.sizes[at]} were laid out")
            places[id(node)] = Place(scratch, layout.offsets[at])
        tensors.append(node)
    index = {id(tensor): at for at, tensor in enumerate(tensors)}
    missing = reached - index.keys()
    if missing:
        lost = next(t for node in graph.nodes for t in (*node.src, node.view_src) if t is not None and id(t) in missing)
        raise InternalError(f"{name}: {lost!r} is used but has no place")
    index[id(None)] = -1
    uses = graph.use_counts()
    uses[id(output)] = 0  # read from outside, so no executor may fuse it away

    placed = []
    for tensor in tensors:
        place = places[id(tensor.owner)]
        placed.append(
            PlacedTensor(
                type=tensor.type,
                ne=tensor.ne,
                nb=tensor.nb,
                op=tensor.op,
                params=tensor.params,
                flags=tensor.flags,
                src=tuple([index[id(source)] for source in tensor.src]),
                view_src=index[id(tensor.view_src)],
                view_offs=tensor.view_offs,
                buffer=place.buffer,
                offset=place.offset + tensor.view_offs,
                name=tensor.name,
                use_count=uses.get(id(tensor), 0),
            )
        )
    return Program(name, tuple(placed), tuple(range(first_node, first_node + len(graph.nodes))))


@dataclass(frozen=True, slots=True)
class Packing:
    """Sizes of the buffers to reserve, and for every packed thing its buffer's number and its offset there."""

    buffer_sizes: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def pack(sizes: Sequence[int], alignment: int, max_buffer_bytes: int) -> Packing:
    """Pack things in order into as few buffers as their largest allowed size permits.

    A thing larger than a buffer may be gets one of its own, which the device will refuse by name.
    """
    buffers: list[int] = []
    places: list[tuple[int, int]] = []
    for size in sizes:
        need = align_up(size, alignment)
        if not buffers or buffers[-1] + need > max_buffer_bytes:
            buffers.append(0)
        places.append((len(buffers) - 1, buffers[-1]))
        buffers[-1] += need
    return Packing(tuple(buffers), tuple(places))
