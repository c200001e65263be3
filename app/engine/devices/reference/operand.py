"""A tensor as kernels see it: a numpy view over its buffer, and the way from and to float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import TRAITS, GGMLType, Shape, row_bytes
from app.engine.gguf import quants
from app.engine.gguf.quants.blocks import halves_of
from app.engine.program import PlacedTensor

Floats = NDArray[np.float32]
#: A view of whatever element type the tensor has.
View = NDArray[Any]
#: Memory of one buffer.
Memory = NDArray[np.uint8]

#: Types whose elements stand alone. BF16 is handled by its bits.
DTYPES: dict[GGMLType, type[np.generic]] = {
    GGMLType.F32: np.float32,
    GGMLType.F16: np.float16,
    GGMLType.BF16: np.uint16,
    GGMLType.I8: np.int8,
    GGMLType.I16: np.int16,
    GGMLType.I32: np.int32,
    GGMLType.I64: np.int64,
    GGMLType.F64: np.float64,
}


@dataclass(frozen=True, slots=True)
class Operand:
    """A placed tensor with its view.

    `array` is [n3, n2, n1, n0] of the element type; for quantized types [n3, n2, n1, row bytes] of uint8.
    """

    tensor: PlacedTensor
    memory: Memory
    array: View

    @property
    def type(self) -> GGMLType:
        return self.tensor.type

    @property
    def ne(self) -> Shape:
        return self.tensor.ne

    @property
    def is_f32(self) -> bool:
        return self.tensor.type is GGMLType.F32

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> View:
        """Another view from the tensor's first byte, in elements of its type; numpy checks that it fits the buffer."""
        return np.ndarray(shape, DTYPES[self.type], self.memory, self.tensor.offset, strides)

    def load(self) -> Floats:
        """All values as float32: the view itself when they are, a new array otherwise."""
        return to_f32(self.type, self.array)

    def store(self, values: Floats) -> None:
        """Write float32 values of the tensor's shape, rounding to its type."""
        self.array[...] = encode(self.type, values)


def bind(tensor: PlacedTensor, memory: Memory) -> Operand:
    """Make the view of a tensor in its buffer's memory. Nothing is read or copied."""
    n0, n1, n2, n3 = tensor.ne
    nb0, nb1, nb2, nb3 = tensor.nb
    if TRAITS[tensor.type].block_elements == 1:
        dtype, row, step = DTYPES[tensor.type], n0, nb0
    else:
        dtype, row, step = np.uint8, row_bytes(tensor.type, n0), 1
    shape = (n3, n2, n1, row)
    if 0 in shape:
        return Operand(tensor, memory, np.empty(shape, dtype))
    return Operand(tensor, memory, np.ndarray(shape, dtype, memory, tensor.offset, (nb3, nb2, nb1, step)))


def to_f32(type_: GGMLType, array: View, out: Floats | None = None) -> Floats:
    """Values of an array of a type's elements or row bytes as float32.

    `out` is used for quantized types only; float32 comes back as it is.
    """
    if type_ is GGMLType.F32:
        return array
    if type_ is GGMLType.F16:
        return halves_of(array.view(np.uint16))
    if type_ is GGMLType.BF16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if TRAITS[type_].block_elements == 1:
        return array.astype(np.float32)
    flat = quants.dequantize(type_, array.reshape(-1, array.shape[-1]), out)
    return flat.reshape(*array.shape[:-1], -1)


def encode(type_: GGMLType, values: Floats) -> View:
    """float32 values [..., n] as they stand in memory for a type: elements, or the bytes of blocks.

    Floats round to nearest even, integers towards zero.
    """
    if type_ is GGMLType.F32:
        return values
    if type_ is not GGMLType.BF16 and TRAITS[type_].block_elements == 1:
        return values.astype(DTYPES[type_])
    rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    packed = quants.quantize(type_, rows)
    if type_ is GGMLType.BF16:
        return packed.view(np.uint16).reshape(values.shape)
    return packed.reshape(*values.shape[:-1], -1)
