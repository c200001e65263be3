"""One node of a program under check, and the questions rules ask about it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from app.engine.ggml import TRAITS, GGMLType, Shape
from app.engine.program import PlacedTensor
from app.errors import UnsupportedOp

FLOATS = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
#: Formats of activations on their way into a dot product; no file and no graph holds them.
INTERNAL = frozenset({GGMLType.Q8_1, GGMLType.Q8_K})
QUANTIZED = frozenset(type_ for type_, traits in TRAITS.items() if traits.block_elements > 1) - INTERNAL
#: What a matrix or a table of rows may be.
WEIGHTS = FLOATS | QUANTIZED
#: What float32 values may be stored as: the types of caches.
STORABLE = FLOATS | {
    GGMLType.Q8_0,
    GGMLType.Q4_0,
    GGMLType.Q4_1,
    GGMLType.Q5_0,
    GGMLType.Q5_1,
    GGMLType.IQ4_NL,
}


def is_contiguous_from(tensor: PlacedTensor, free_dims: int) -> bool:
    """Whether rows are packed and every stride above dimension `free_dims` follows from the one below it.

    `free_dims` 0 is plain contiguity; 1 leaves the stride of dimension 1 free (halves of rows), and so on.
    Dimensions of extent 1 do not count.
    """
    traits = TRAITS[tensor.type]
    if tensor.ne[0] != traits.block_elements and tensor.nb[0] != traits.block_bytes:
        return False
    expected = traits.block_bytes * (tensor.ne[0] // traits.block_elements)
    for dim in range(1, 4):
        if tensor.ne[dim] == 1:
            continue
        if dim > free_dims:
            if tensor.nb[dim] != expected:
                return False
            expected *= tensor.ne[dim]
        else:
            expected = tensor.ne[dim] * tensor.nb[dim]
    return True


def is_contiguous(tensor: PlacedTensor) -> bool:
    """Whether all strides are those of a freshly made tensor."""
    return is_contiguous_from(tensor, 0)


def has_packed_rows(tensor: PlacedTensor) -> bool:
    """Whether the elements of each row lie one behind the other; rows may lie anywhere."""
    traits = TRAITS[tensor.type]
    return tensor.ne[0] == traits.block_elements or tensor.nb[0] == traits.block_bytes


def can_repeat(small: Shape, large: Shape) -> bool:
    """Whether `small` tiles `large` in every dimension."""
    return all(n > 0 and whole % n == 0 for n, whole in zip(small, large, strict=True))


def is_same_place(a: PlacedTensor, b: PlacedTensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return a.buffer is b.buffer and a.offset == b.offset and a.type == b.type and a.ne == b.ne and a.nb == b.nb


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """A computed node with its sources. `require` refuses; everything else only looks."""

    device_name: str
    tensor: PlacedTensor
    sources: tuple[PlacedTensor | None, ...]

    def refuse(self, reason: str) -> NoReturn:
        where = f"{self.tensor.name}: " if self.tensor.name else ""
        raise UnsupportedOp(self.device_name, self.tensor.op.name, where + reason)

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            self.refuse(reason)

    def src(self, i: int) -> PlacedTensor:
        source = self.sources[i] if i < len(self.sources) else None
        if source is None:
            self.refuse(f"source {i} is missing")
        return source

    def optional(self, i: int) -> PlacedTensor | None:
        return self.sources[i] if i < len(self.sources) else None

    def param(self, i: int) -> int:
        """Word `i` of the parameters as a signed integer; absent words are 0."""
        return self.tensor.params[i] if i < len(self.tensor.params) else 0

    def param_f32(self, i: int) -> float:
        """Word `i` of the parameters as the float its bits are."""
        value: float = struct.unpack("<f", struct.pack("<i", self.param(i)))[0]
        return value

    # What rules have in common.

    def takes(self, required: int, optional: Iterable[int] = ()) -> None:
        """Sources 0 to `required` - 1 must be there, the `optional` ones may, no other may."""
        allowed = {*range(required), *optional}
        for i in range(required):
            self.src(i)
        for i, source in enumerate(self.sources):
            self.require(source is None or i in allowed, f"it takes no source {i}")

    def type_in(self, tensor: PlacedTensor, types: Iterable[GGMLType], what: str) -> None:
        allowed = frozenset(types)
        if tensor.type not in allowed:
            self.refuse(f"{what} is {tensor.type.name}, it may be {'/'.join(sorted(t.name for t in allowed))}")

    def all_f32(self, *tensors: PlacedTensor) -> None:
        for tensor in tensors:
            self.type_in(tensor, (GGMLType.F32,), tensor.name or "an operand")

    def shape_is(self, tensor: PlacedTensor, ne: Iterable[int], what: str) -> None:
        want = tuple(ne)
        if tensor.ne != want:
            self.refuse(f"{what} has shape {list(tensor.ne)}, it should have {list(want)}")

    def repeats_into(self, small: PlacedTensor, large: PlacedTensor, what: str) -> None:
        if not can_repeat(small.ne, large.ne):
            self.refuse(f"{what} of shape {list(small.ne)} does not tile {list(large.ne)}")

    def packed(self, tensor: PlacedTensor, what: str) -> None:
        self.require(has_packed_rows(tensor), f"the rows of {what} are not packed (nb0 is {tensor.nb[0]})")

    def contiguous(self, tensor: PlacedTensor, what: str, free_dims: int = 0) -> None:
        if not is_contiguous_from(tensor, free_dims):
            self.refuse(f"{what} is not contiguous (ne {list(tensor.ne)}, nb {list(tensor.nb)})")

    def fresh_f32(self, ne: Iterable[int]) -> None:
        """The usual result: float32, contiguous, of this shape."""
        self.type_in(self.tensor, (GGMLType.F32,), "the result")
        self.shape_is(self.tensor, ne, "the result")
        self.contiguous(self.tensor, "the result")
