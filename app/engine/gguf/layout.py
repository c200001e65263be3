"""The GGUF container byte by byte: header, metadata and tensor table of one file.

Layout, all integers little-endian: the magic "GGUF", u32 version, i64 tensor count, i64 pair count; then the pairs (key
string, u32 value type, value); then the tensor table (name string, u32 dimensions, i64 extents, u32 type, u64 offset);
then padding and the data section. A string is u64 bytes and the bytes. Nothing read from the file is believed before
it was held against the bytes that are really there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from app.engine.ggml import MAX_DIMS, MAX_NAME_BYTES, TRAITS, GGMLType, Shape, row_bytes
from app.errors import FormatError

MAGIC = b"GGUF"
READABLE_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_STRING_BYTES = 1 << 30
MAX_ARRAY_ELEMENTS = 1 << 30
MAX_TENSOR_ELEMENTS = (1 << 63) - 1
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # a one-letter key and a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # an empty name and no dimension

#: Types that were removed upstream, and what to do about a file that has them.
_REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


class ValueType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


#: numpy's names of the types with a fixed size.
SCALAR_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table. `offset` counts from the start of the file `path`."""

    name: str
    type: GGMLType
    ne: Shape
    n_dims: int
    n_bytes: int
    offset: int
    path: str


@dataclass(frozen=True, slots=True)
class Layout:
    """What one file says about itself: metadata in Python values, and where its tensors lie.

    Strings are `str` (bytes that are not UTF-8 become surrogates), arrays of strings `list[bytes]`.
    """

    version: int
    metadata: dict[str, Any]
    value_types: dict[str, ValueType]
    tensors: list[TensorInfo]


class Cursor:
    """Reads forward through a buffer and refuses to step past its end.

    Slicing the buffer must give `bytes`, as `bytes` and `mmap` do.
    """

    __slots__ = ("buffer", "path", "position", "size_bytes")

    def __init__(self, buffer: Any, path: str) -> None:
        self.buffer = buffer
        self.path = path
        self.position = 0
        self.size_bytes = len(buffer)

    @property
    def left_bytes(self) -> int:
        return self.size_bytes - self.position

    def error(self, message: str) -> FormatError:
        return FormatError(f"{self.path}: {message}")

    def take(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` and return where they start."""
        start = self.position
        if n_bytes > self.size_bytes - start:
            raise self.error(
                f"{what} at byte {start} needs {n_bytes} bytes, but the file ends after {self.size_bytes - start} more "
                f"({self.size_bytes} in all); it is truncated or corrupt, fetch it again"
            )
        self.position = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def i64(self, what: str) -> int:
        return int(_I64.unpack_from(self.buffer, self.take(8, what))[0])

    def string(self, what: str) -> bytes:
        n_bytes = self.u64(f"the length of {what}")
        if n_bytes > MAX_STRING_BYTES:
            raise self.error(
                f"{what} at byte {self.position} claims {n_bytes} bytes, more than the {MAX_STRING_BYTES} "
                f"a string may have; the file is corrupt"
            )
        start = self.take(n_bytes, what)
        return bytes(self.buffer[start : start + n_bytes])


def parse_layout(buffer: Any, path: str) -> Layout:
    """Read header, metadata and tensor table; check that every tensor's bytes are there. Raises FormatError."""
    cursor = Cursor(buffer, path)
    version = _read_version(cursor)
    n_tensors = _read_count(cursor, "tensors", _MIN_TENSOR_BYTES)
    n_pairs = _read_count(cursor, "metadata pairs", _MIN_PAIR_BYTES)
    metadata: dict[str, Any] = {}
    value_types: dict[str, ValueType] = {}
    for index in range(n_pairs):
        key = _read_key(cursor, index)
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice; the file is corrupt")
        value_types[key], metadata[key] = _read_value(cursor, key)
    alignment_bytes = _alignment(cursor, metadata, value_types)
    tensors = _read_tensors(cursor, n_tensors, alignment_bytes)
    return Layout(version, metadata, value_types, tensors)


def _read_version(cursor: Cursor) -> int:
    magic = bytes(cursor.buffer[:4])
    if magic != MAGIC:
        shown = "".join(chr(b) if 32 <= b < 127 else "?" for b in magic)
        raise cursor.error(f"not a GGUF file: it starts with {shown!r} instead of 'GGUF'")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            f"the version reads as {version}: the file has the other byte order (big-endian), which is not supported; "
            f"convert it to little-endian"
        )
    if version not in READABLE_VERSIONS:
        raise cursor.error(f"GGUF version {version} is not supported; this reader knows versions 2 and 3")
    return version


def _read_count(cursor: Cursor, what: str, min_bytes: int) -> int:
    count = cursor.i64(f"the number of {what}")
    if count < 0 or count * min_bytes > cursor.left_bytes:
        raise cursor.error(
            f"the header promises {count} {what}, which need at least {max(count, 0) * min_bytes} bytes, "
            f"but {cursor.left_bytes} are left; the file is truncated or corrupt"
        )
    return count


def _read_key(cursor: Cursor, index: int) -> str:
    raw = cursor.string(f"metadata key {index}")
    if not raw:
        raise cursor.error(f"metadata key {index} is empty; the file is corrupt")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise cursor.error(f"metadata key {index} ({raw[:40]!r}) is not text; the file is corrupt") from None


def _value_type(cursor: Cursor, key: str, what: str) -> ValueType:
    number = cursor.u32(f"the {what} of metadata key {key!r}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.error(
            f"metadata key {key!r} has the unknown {what} {number}; the file is corrupt or newer"
        ) from None


def _read_value(cursor: Cursor, key: str) -> tuple[ValueType, Any]:
    kind = _value_type(cursor, key, "value type")
    what = f"the value of metadata key {key!r}"
    if kind is ValueType.STRING:
        return kind, cursor.string(what).decode("utf-8", "surrogateescape")
    if kind is ValueType.ARRAY:
        return kind, _read_array(cursor, key)
    return kind, _read_scalars(cursor, kind, 1, what)[0]


def _read_array(cursor: Cursor, key: str) -> list[Any]:
    kind = _value_type(cursor, key, "array element type")
    if kind is ValueType.ARRAY:
        raise cursor.error(f"metadata key {key!r} is an array of arrays, which no reader supports")
    count = cursor.u64(f"the length of metadata array {key!r}")
    min_bytes = 8 if kind is ValueType.STRING else SCALAR_DTYPES[kind].itemsize
    if count > MAX_ARRAY_ELEMENTS or count * min_bytes > cursor.left_bytes:
        raise cursor.error(
            f"metadata array {key!r} at byte {cursor.position} claims {count} elements, at least {count * min_bytes} "
            f"bytes, but {cursor.left_bytes} are left; the file is truncated or corrupt"
        )
    if kind is ValueType.STRING:
        return _read_strings(cursor, count, key)
    return _read_scalars(cursor, kind, count, f"metadata array {key!r}")


def _read_scalars(cursor: Cursor, kind: ValueType, count: int, what: str) -> list[Any]:
    dtype = SCALAR_DTYPES[kind]
    start = cursor.take(count * dtype.itemsize, what)
    values = np.frombuffer(cursor.buffer[start : cursor.position], dtype)
    return [bool(v) for v in values] if kind is ValueType.BOOL else list(values.tolist())


def _read_strings(cursor: Cursor, count: int, key: str) -> list[bytes]:
    """The hot loop of loading: vocabularies have hundreds of thousands of strings."""
    buffer, size_bytes, position = cursor.buffer, cursor.size_bytes, cursor.position
    length_at: Callable[[Any, int], tuple[int]] = _U64.unpack_from
    strings: list[bytes] = []
    append = strings.append
    for _ in range(count):
        start = position + 8
        if start > size_bytes:
            break
        (n_bytes,) = length_at(buffer, position)
        if n_bytes > size_bytes - start:
            break
        position = start + n_bytes
        append(buffer[start:position])
    cursor.position = position
    if len(strings) < count:
        cursor.string(f"element {len(strings)} of metadata array {key!r}")  # says what is wrong
    return strings


def _alignment(cursor: Cursor, metadata: dict[str, Any], value_types: dict[str, ValueType]) -> int:
    if "general.alignment" not in metadata:
        return DEFAULT_ALIGNMENT_BYTES
    value, kind = metadata["general.alignment"], value_types["general.alignment"]
    if kind is not ValueType.UINT32 or value == 0 or value & (value - 1):
        raise cursor.error(f"general.alignment is {value!r} ({kind.name}); it must be a uint32 power of two")
    return int(value)


def _read_tensors(cursor: Cursor, n_tensors: int, alignment_bytes: int) -> list[TensorInfo]:
    entries = [_read_entry(cursor, index) for index in range(n_tensors)]
    data_start = -(-cursor.position // alignment_bytes) * alignment_bytes
    infos: list[TensorInfo] = []
    names: set[str] = set()
    expected = 0
    for name, type_, dims, offset in entries:
        if name in names:
            raise cursor.error(f"tensor {name!r} appears twice; the file is corrupt")
        names.add(name)
        if offset % alignment_bytes or offset != expected:
            raise cursor.error(
                f"tensor {name!r} claims offset {offset} of the data section, but the tensors before it end at "
                f"{expected} (aligned to {alignment_bytes}); the tensor table is corrupt"
            )
        n_bytes = _tensor_bytes(type_, dims)
        start = data_start + offset
        if n_bytes > cursor.size_bytes - start:
            raise cursor.error(
                f"tensor {name!r} at byte {start} needs {n_bytes} bytes, but {max(0, cursor.size_bytes - start)} are "
                f"there (the file has {cursor.size_bytes}); it is truncated or incomplete, fetch it again"
            )
        ne = (*dims, 1, 1, 1, 1)[:MAX_DIMS]
        infos.append(TensorInfo(name, type_, (ne[0], ne[1], ne[2], ne[3]), len(dims), n_bytes, start, cursor.path))
        expected = -(-(offset + n_bytes) // alignment_bytes) * alignment_bytes
    return infos


def _tensor_bytes(type_: GGMLType, dims: list[int]) -> int:
    n_bytes = row_bytes(type_, dims[0] if dims else 1)
    for extent in dims[1:]:
        n_bytes *= extent
    return n_bytes


def _read_entry(cursor: Cursor, index: int) -> tuple[str, GGMLType, list[int], int]:
    raw = cursor.string(f"the name of tensor {index}")
    name = raw.decode("utf-8", "replace")
    if len(raw) >= MAX_NAME_BYTES:
        raise cursor.error(
            f"the name of tensor {index} ({name[:MAX_NAME_BYTES]!r}...) has {len(raw)} bytes, more than the "
            f"{MAX_NAME_BYTES - 1} it may have; the tensor table is corrupt"
        )
    n_dims = cursor.u32(f"the dimensions of tensor {name!r}")
    if n_dims > MAX_DIMS:
        raise cursor.error(f"tensor {name!r} claims {n_dims} dimensions, more than {MAX_DIMS}; the file is corrupt")
    dims = [cursor.i64(f"the extents of tensor {name!r}") for _ in range(n_dims)]
    type_ = _tensor_type(cursor, name)
    offset = cursor.u64(f"the offset of tensor {name!r}")
    _check_shape(cursor, name, type_, dims)
    return name, type_, dims, offset


def _tensor_type(cursor: Cursor, name: str) -> GGMLType:
    number = cursor.u32(f"the type of tensor {name!r}")
    if number in _REMOVED_TYPES:
        raise cursor.error(
            f"tensor {name!r} has type {number} ({_REMOVED_TYPES[number]}), which was removed from the format; "
            f"quantize the model again"
        )
    try:
        return GGMLType(number)
    except ValueError:
        raise cursor.error(f"tensor {name!r} has the unknown type {number}; the file is corrupt or newer") from None


def _check_shape(cursor: Cursor, name: str, type_: GGMLType, dims: list[int]) -> None:
    count = 1
    for extent in dims:
        count *= extent
        if extent < 0 or count > MAX_TENSOR_ELEMENTS:
            raise cursor.error(f"tensor {name!r} has the impossible shape {dims}; the tensor table is corrupt")
    block = TRAITS[type_].block_elements
    if (dims[0] if dims else 1) % block:
        raise cursor.error(
            f"tensor {name!r} of type {type_.name} has rows of {dims[0] if dims else 1} elements, which is not a "
            f"multiple of its block of {block}; the tensor table is corrupt"
        )
