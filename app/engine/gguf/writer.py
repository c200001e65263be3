"""Writes small GGUF files: what tests need, and nothing more."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from app.engine.ggml import GGMLType
from app.engine.gguf.layout import DEFAULT_ALIGNMENT_BYTES, MAGIC, SCALAR_DTYPES, ValueType


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value with its type said, where the guess of `write_gguf` would not do. For arrays: the elements'."""

    type: ValueType
    value: Any


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor to write: `data` holds its packed rows, `dims` its extents, fastest first."""

    name: str
    type: GGMLType
    dims: tuple[int, ...]
    data: bytes | np.ndarray[Any, Any]


def write_gguf(path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Sequence[TensorData]) -> Path:
    """Write a version 3 file. Integers become UINT32, or the smallest type they fit; floats FLOAT32."""
    target = Path(path)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    with open(target, "wb") as file:
        file.write(MAGIC + struct.pack("<Iqq", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(value))
        offset = 0
        blobs = [np.ascontiguousarray(t.data).tobytes() if isinstance(t.data, np.ndarray) else t.data for t in tensors]
        for tensor, blob in zip(tensors, blobs, strict=True):
            dims = struct.pack(f"<I{len(tensor.dims)}q", len(tensor.dims), *tensor.dims)
            file.write(_string(tensor.name) + dims + struct.pack("<IQ", tensor.type, offset))
            offset += len(blob) + -len(blob) % alignment
        for blob in blobs:
            _pad(file, alignment)
            file.write(blob)
        _pad(file, alignment)
    return target


def write_split_gguf(
    folder: Path, prefix: str, metadata: Mapping[str, Any], groups: Sequence[Sequence[TensorData]]
) -> list[Path]:
    """Write one file per group of tensors, named and numbered as a split model. All metadata goes into the first."""
    n_files, n_tensors = len(groups), sum(map(len, groups))
    paths = []
    for number, group in enumerate(groups):
        split = {
            "split.no": Typed(ValueType.UINT16, number),
            "split.count": Typed(ValueType.UINT16, n_files),
            "split.tensors.count": Typed(ValueType.INT32, n_tensors),
        }
        path = folder / f"{prefix}-{number + 1:05d}-of-{n_files:05d}.gguf"
        paths.append(write_gguf(path, {**(metadata if number == 0 else {}), **split}, group))
    return paths


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _string(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _guess(value: object) -> ValueType:
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return ValueType.UINT32
        return ValueType.INT32 if -(1 << 31) <= value < 0 else ValueType.INT64
    return ValueType.FLOAT32 if isinstance(value, float) else ValueType.STRING


def _value(value: Any) -> bytes:
    kind = None
    if isinstance(value, Typed):
        kind, value = value.type, value.value
    if isinstance(value, list | tuple):
        kind = kind if kind is not None else _guess(value[0])
        return struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)) + _elements(kind, value)
    kind = kind if kind is not None else _guess(value)
    return struct.pack("<I", kind) + _elements(kind, [value])


def _elements(kind: ValueType, values: Iterable[Any]) -> bytes:
    if kind is ValueType.STRING:
        return b"".join(map(_string, values))
    return np.array(list(values), SCALAR_DTYPES[kind]).tobytes()
