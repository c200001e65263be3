"""How a test of one op is written, placed and run: any device, any case.

A case builds tensors with `CaseBuilder`, says what they hold and what must come out. `run_case` places every tensor
between guard zones, runs the program, and gives back what the device holds; bytes outside the results must not change.
Values are numpy arrays with dimensions in ggml's reverse order.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from app.engine.device import Device
from app.engine.ggml import TRAITS, GGMLType, Op, Shape, TensorFlag, contiguous_strides
from app.engine.graph import Tensor, leaf, shape4
from app.engine.program import Buffer, PlacedTensor, Program

Values = NDArray[Any]

F32, F16, BF16, I32, I64 = GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.I32, GGMLType.I64
NAN, INF = float("nan"), float("inf")
DTYPES: dict[GGMLType, Any] = {
    F32: np.float32,
    F16: np.float16,
    BF16: np.uint16,
    GGMLType.I8: np.int8,
    GGMLType.I16: np.int16,
    I32: np.int32,
    I64: np.int64,
}
GUARD = 0xC7  # as a float of any width far from 0, so that what is left unwritten shows
GUARD_BYTES = 256

#: How far results may be from the formula, by kernel variant and kind of case, in units of |wanted| + rms(wanted).
#: "quantized" products may round activations to 8 bits, "attention" may round queries to the cache's type.
TOLERANCES: dict[str, dict[str, float]] = {
    "numpy": {
        "exact": 0,
        "float": 2e-6,
        "f16": 1e-3,
        "bf16": 8e-3,
        "product": 2e-6,
        "quantized": 5e-6,
        "attention": 5e-6,
    },
}
OTHER_TOLERANCES = {
    "exact": 0,
    "float": 5e-6,
    "f16": 1e-3,
    "bf16": 8e-3,
    "product": 1e-3,
    "quantized": 3e-2,
    "attention": 2e-3,
}


def float_word(value: float) -> int:
    """The bits of a float32 as a signed word."""
    word: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return word


def bf16_bits(values: Values) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even, by exact arithmetic: 8 significant bits."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    rounded = np.ldexp(np.rint(mantissa * 256), exponent - 8).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def decode(type_: GGMLType, raw: Values) -> Values:
    """Elements or row bytes as float64 (integers stay integers). Quantized types by an independent decoder."""
    if type_ is BF16:
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if type_ in (F32, F16):
        return raw.astype(np.float64)
    if TRAITS[type_].block_elements == 1:
        return raw
    rows = np.ascontiguousarray(raw).reshape(-1, raw.shape[-1])
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(type_)))
    return values.reshape(*raw.shape[:-1], -1).astype(np.float64)


@dataclass(slots=True)
class Expectation:
    tensor: Tensor
    values: Values
    kind: str


class CaseBuilder:
    """Collects the leaves, nodes and expectations of one case. `rng` is seeded by the case's name."""

    def __init__(self, name: str) -> None:
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.leaves: list[Tensor] = []
        self.raw: dict[int, Values] = {}
        self.nodes: list[Tensor] = []
        self.expectations: list[Expectation] = []

    # Leaves.

    def leaf(self, type_: GGMLType, values: Values) -> Tensor:
        """A leaf that holds these values, rounded to its type; the shape is the array's, reversed."""
        array = np.asarray(values)
        raw = bf16_bits(array) if type_ is BF16 else array.astype(DTYPES[type_])
        return self.raw_leaf(type_, tuple(reversed(array.shape)) or (1,), raw)

    def raw_leaf(self, type_: GGMLType, ne: Sequence[int], raw: Values) -> Tensor:
        """A leaf of given elements, or of given row bytes for quantized types."""
        tensor = leaf(type_, ne, f"leaf{len(self.leaves)}")
        self.leaves.append(tensor)
        self.raw[id(tensor)] = np.ascontiguousarray(raw)
        return tensor

    def random(self, type_: GGMLType, *ne: int) -> Tensor:
        """A leaf of standard normal values; quantized types get random blocks with sane scales."""
        if TRAITS[type_].block_elements == 1:
            return self.leaf(type_, self.rng.standard_normal(tuple(reversed(ne))))
        values = self.rng.standard_normal((int(np.prod(ne[1:])), ne[0])).astype(np.float32)
        return self.raw_leaf(type_, ne, random_blocks(self.rng, type_, values))

    def values(self, tensor: Tensor) -> Values:
        """What a leaf, or a view of one, holds: [n3, n2, n1, n0] as float64 or integers."""
        raw = self.raw[id(tensor.owner)]
        return decode(tensor.type, strided(tensor, np.frombuffer(raw.tobytes(), np.uint8), tensor.view_offs))

    # Views and nodes.

    def view(self, of: Tensor, ne: Sequence[int], nb: Sequence[int], offset: int = 0, op: Op = Op.VIEW) -> Tensor:
        """Another name for memory of `of`; all four strides must be given, in bytes."""
        assert len(nb) == 4
        strides: Shape = (nb[0], nb[1], nb[2], nb[3])
        tensor = Tensor(of.type, shape4(ne), strides, op, (), (of,), of.owner, of.view_offs + offset, name="view")
        self.nodes.append(tensor)
        return tensor

    def permute(self, of: Tensor, *order: int) -> Tensor:
        """Dimension i of the result is dimension order[i] of `of`."""
        ne, nb = [of.ne[i] for i in order], [of.nb[i] for i in order]
        return self.view(of, ne, nb, op=Op.PERMUTE)

    def reshape(self, of: Tensor, *ne: int) -> Tensor:
        return self.view(of, ne, contiguous_strides(of.type, shape4(ne)), op=Op.RESHAPE)

    def node(
        self,
        op: Op,
        type_: GGMLType,
        ne: Sequence[int],
        src: Iterable[Tensor | None],
        params: Sequence[int | float] = (),
        alias: Tensor | None = None,
    ) -> Tensor:
        """A computed node; float parameters are stored as their bits. `alias`: the result is this tensor's memory."""
        words = tuple(float_word(word) if isinstance(word, float) else int(word) for word in params)
        shape = shape4(ne)
        strides = contiguous_strides(type_, shape) if alias is None else alias.nb
        tensor = Tensor(type_, shape, strides, op, words, tuple(src), flags=TensorFlag.COMPUTE)
        tensor.name = f"{op.name.lower()}{len(self.nodes)}"
        if alias is not None:
            tensor.view_src, tensor.view_offs = alias.owner, alias.view_offs
        self.nodes.append(tensor)
        return tensor

    def expect(self, tensor: Tensor, values: Values, kind: str = "float") -> None:
        """Say what a tensor must hold; `kind` names the tolerance."""
        self.expectations.append(Expectation(tensor, np.asarray(values), kind))


def random_blocks(rng: np.random.Generator, type_: GGMLType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows of random blocks of a type: every code occurs, and scales are small and finite.

    Bytes that are parts of 16-bit scales are replaced by halves near 0.01; 8-bit exponents stay near that of 0.01.
    """
    elements, n_bytes = TRAITS[type_]
    rows, n_blocks = values.shape[0], values.shape[1] // elements
    raw = rng.integers(0, 256, (rows, n_blocks, n_bytes), dtype=np.uint8)
    for offset in HALF_OFFSETS.get(type_, ()):
        scales = (rng.uniform(0.5, 1.5, (rows, n_blocks)) * 0.01).astype(np.float16)
        raw[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    if type_ is GGMLType.MXFP4:
        raw[..., 0] = rng.integers(118, 124, (rows, n_blocks))
    return raw.reshape(rows, -1)


#: Where the float16 scales of a block stand.
HALF_OFFSETS: dict[GGMLType, tuple[int, ...]] = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_XS: (0,),
    GGMLType.IQ2_XXS: (0,),
    GGMLType.IQ2_XS: (0,),
    GGMLType.IQ2_S: (0,),
    GGMLType.IQ3_XXS: (0,),
    GGMLType.IQ3_S: (0,),
    GGMLType.IQ1_S: (0,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
}

Case = Callable[[CaseBuilder], None]
CASES: dict[str, Case] = {}


def op_case(name: str, *variants: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a case, once per tuple of arguments that follow the builder."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for arguments in variants or ((),):
            label = "-".join([name, *map(_label, arguments)])
            assert label not in CASES, f"two cases are called {label}"
            CASES[label] = lambda c, arguments=arguments: function(c, *arguments)  # type: ignore[misc]
        return function

    return register


def _label(argument: Any) -> str:
    text = getattr(argument, "name", None) or str(argument)
    return text.replace(" ", "").lower()


def strided(tensor: Tensor | PlacedTensor, memory: NDArray[np.uint8], offset: int) -> Values:
    """A tensor's elements (or row bytes) in a copy of its memory, [n3, n2, n1, n0]."""
    n0, n1, n2, n3 = tensor.ne
    nb0, nb1, nb2, nb3 = tensor.nb
    traits = TRAITS[tensor.type]
    if traits.block_elements == 1:
        return np.ndarray((n3, n2, n1, n0), DTYPES[tensor.type], memory, offset, (nb3, nb2, nb1, nb0)).copy()
    width = n0 // traits.block_elements * traits.block_bytes
    return np.ndarray((n3, n2, n1, width), np.uint8, memory, offset, (nb3, nb2, nb1, 1)).copy()


@dataclass(slots=True)
class Placed:
    """A case's program on a device, before it runs. `image` is what its buffer holds."""

    program: Program
    buffer: Buffer
    image: NDArray[np.uint8]
    offsets: dict[int, int]  # by id of the owning tensor


def place(case: CaseBuilder, device: Device) -> Placed:
    """Put every tensor that owns memory behind a guard zone, the inputs filled in."""
    tensors = list(dict.fromkeys([*case.leaves, *case.nodes]))
    alignment = device.caps.alignment_bytes
    offsets: dict[int, int] = {}
    end = GUARD_BYTES
    for tensor in tensors:
        if tensor.view_src is None:
            offsets[id(tensor)] = end
            end = -(-(end + tensor.n_bytes + GUARD_BYTES) // alignment) * alignment
    image = np.full(end, GUARD, np.uint8)
    for tensor in case.leaves:
        raw = case.raw[id(tensor)].reshape(-1).view(np.uint8)
        start = offsets[id(tensor)]
        image[start : start + len(raw)] = raw
    buffer = device.alloc(end)
    device.write(buffer, 0, image.tobytes()).result()
    index = {id(tensor): at for at, tensor in enumerate(tensors)}
    placed = tuple(
        PlacedTensor(
            type=tensor.type,
            ne=tensor.ne,
            nb=tensor.nb,
            op=tensor.op,
            params=tensor.params,
            flags=tensor.flags,
            src=tuple(-1 if source is None else index[id(source)] for source in tensor.src),
            view_src=-1 if tensor.view_src is None else index[id(tensor.view_src)],
            view_offs=tensor.view_offs,
            buffer=buffer,
            offset=offsets[id(tensor.owner)] + tensor.view_offs,
            name=tensor.name,
        )
        for tensor in tensors
    )
    return Placed(Program("case", placed, tuple(index[id(node)] for node in case.nodes)), buffer, image, offsets)


def read_all(device: Device, buffer: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(device.read(buffer, 0, buffer.size_bytes).result(), np.uint8)


def run_case(case: CaseBuilder, device: Device) -> Placed:
    """Run a case and compare all it expects; bytes that belong to no computed result must be as they were."""
    placed = place(case, device)
    handle = device.prepare(placed.program)
    try:
        device.run(handle)
        after = read_all(device, placed.buffer)
    finally:
        device.release(handle)
        device.free(placed.buffer)
    tolerances = TOLERANCES.get(device.caps.kernel_variant, OTHER_TOLERANCES)
    for expectation in case.expectations:
        tensor = expectation.tensor
        got = decode(tensor.type, strided(tensor, after, placed.offsets[id(tensor.owner)] + tensor.view_offs))
        compare(got, expectation.values, tolerances[expectation.kind], tensor.name)
    check_untouched(placed, after)
    return placed


def check_untouched(placed: Placed, after: NDArray[np.uint8]) -> None:
    """Whatever no computed node's result covers must hold what it held."""
    may_change = np.zeros(len(after), bool)
    for index in placed.program.nodes:
        tensor = placed.program.tensors[index]
        if tensor.is_computed:
            may_change[tensor.offset : tensor.offset + tensor.n_bytes] = True
    changed = np.flatnonzero((after != placed.image) & ~may_change)
    assert not changed.size, f"{changed.size} bytes outside the results changed, the first at {changed[0]}"


def compare(got: Values, want: Values, tolerance: float, what: str) -> None:
    """Values within tolerance; NaN and infinities must stand where they are wanted."""
    wanted = np.asarray(want).reshape(got.shape)
    if tolerance == 0:
        np.testing.assert_array_equal(got, wanted, err_msg=what)
        return
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite], err_msg=what)
    assert np.isfinite(got[finite]).all(), f"{what}: a value is not finite that should be"
    size = np.sqrt(np.mean(np.square(wanted[finite]))) if finite.any() else 0.0
    error = np.abs(got - wanted)[finite] / (np.abs(wanted[finite]) + size + 1e-30)
    assert error.size == 0 or error.max() <= tolerance, f"{what}: off by {error.max():.3g}, allowed are {tolerance:.3g}"
