"""Model files in memory: GGUF over mmap, split files included.

`GGUFFile.open` checks every length before it believes it (see `layout`), so that whatever it returns can be read
without further care.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from app.engine.gguf.layout import Layout, TensorInfo, parse_layout
from app.errors import FormatError, ModelError

__all__ = ["GGUFFile", "TensorInfo"]

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_REQUIRED = object()


class GGUFFile:
    """One model: metadata, and tensors as views over the mapped file or files.

    Metadata values are Python values; strings are `str`, arrays of strings `list[bytes]` (a token need not be UTF-8).
    Views that `data` hands out keep their file mapped, also after `close`.
    """

    def __init__(self, path: Path, layouts: list[Layout], maps: list[mmap.mmap]) -> None:
        self.path = path
        self.version = layouts[0].version
        self.metadata: Mapping[str, Any] = MappingProxyType(layouts[0].metadata)
        self._maps: dict[str, mmap.mmap] = {}
        tensors: dict[str, TensorInfo] = {}
        for layout, mapped in zip(layouts, maps, strict=True):
            for info in layout.tensors:
                if info.name in tensors:
                    raise FormatError(f"{info.path}: tensor {info.name!r} is also in {tensors[info.name].path}")
                tensors[info.name] = info
                self._maps[info.path] = mapped
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Map a model. For a split model give the first file; the others are found beside it.

        Raises FormatError for bytes that are not what they should be, ModelError for a file that cannot be opened.
        """
        first = Path(path)
        mapped = _map_file(first)
        layout = parse_layout(mapped, str(first))
        layouts, maps = [layout], [mapped]
        n_files = _split_value(layout, first, "split.count", 1)
        for number, part in enumerate(_other_parts(first, layout, n_files), start=1):
            mapped = _map_part(part, first, n_files)
            layout = parse_layout(mapped, str(part))
            _check_part(layout, part, layouts[0], first, number)
            layouts.append(layout)
            maps.append(mapped)
        model = cls(first, layouts, maps)
        if n_files > 1:
            _check_total(model, layouts[0], first)
        return model

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapped files; a file stays mapped while a view of it is alive."""
        self._maps.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.n_bytes for info in self.tensors.values())

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only and not copied. Raises FormatError when there is no such tensor."""
        info = self.tensor(name)
        return memoryview(self._maps[info.path])[info.offset : info.offset + info.n_bytes].toreadonly()

    def forget(self, name: str) -> None:
        """Let the system take back the pages that only this tensor occupies; reading them again fetches them again."""
        info = self.tensor(name)
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + info.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[info.path].madvise(mmap.MADV_DONTNEED, start, end - start)

    def tensor(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise FormatError(f"{self.path}: missing tensor {name!r}") from None

    # Typed access to metadata. Any width of integer will do; third-party files are not strict about it.

    def text(self, key: str, default: str | object = _REQUIRED) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong_type(key, value, "a string")
        return value

    def integer(self, key: str, default: int | object = _REQUIRED) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong_type(key, value, "an integer")
        return value

    def number(self, key: str, default: float | object = _REQUIRED) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong_type(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool | object = _REQUIRED) -> bool:
        value = self._value(key, default)
        if not isinstance(value, int):
            raise self._wrong_type(key, value, "true or false")
        return bool(value)

    def integers(self, key: str, count: int, default: int | object = _REQUIRED) -> tuple[int, ...]:
        """`count` integers: an array of that length, or one number for all."""
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,) * count
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise self._wrong_type(key, value, "an integer or an array of integers")
        if len(value) != count:
            raise FormatError(f"{self.path}: metadata key {key!r} has {len(value)} values, expected {count}")
        return tuple(int(v) for v in value)

    def _value(self, key: str, default: object) -> Any:
        if key in self.metadata:
            return self.metadata[key]
        if default is _REQUIRED:
            raise FormatError(f"{self.path}: metadata key {key!r} is missing; the model cannot be run without it")
        return default

    def _wrong_type(self, key: str, value: object, expected: str) -> FormatError:
        return FormatError(f"{self.path}: metadata key {key!r} holds {type(value).__name__}, expected {expected}")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot open model file {path}: {getattr(error, 'strerror', None) or error}") from error


def _map_part(part: Path, first: Path, n_files: int) -> mmap.mmap:
    if not part.exists():
        raise FormatError(f"{part}: missing; {first.name} is the first of {n_files} files that belong together")
    return _map_file(part)


def _split_value(layout: Layout, path: Path, key: str, default: int) -> int:
    value = layout.metadata.get(key, default)
    if not isinstance(value, int):
        raise FormatError(f"{path}: metadata key {key!r} holds {type(value).__name__}, expected an integer")
    return value


def _other_parts(first: Path, layout: Layout, n_files: int) -> list[Path]:
    """Where the second and later files must be."""
    if n_files <= 1:
        return []
    number = _split_value(layout, first, "split.no", 0)
    match = _SPLIT_NAME.fullmatch(first.name)
    if number != 0:
        hint = f"{match['prefix']}-00001-of-{n_files:05d}.gguf" if match else "the one with split.no 0"
        raise FormatError(f"{first}: this is file {number + 1} of {n_files} of a split model; give the first, {hint}")
    if match is None or int(match["number"]) != 1 or int(match["count"]) != n_files:
        raise FormatError(
            f"{first}: the first of {n_files} files of a split model must be named <name>-00001-of-{n_files:05d}.gguf "
            f"so that the others can be found; it was renamed, or files were joined"
        )
    return [first.with_name(f"{match['prefix']}-{i:05d}-of-{n_files:05d}.gguf") for i in range(2, n_files + 1)]


def _check_part(layout: Layout, part: Path, first_layout: Layout, first: Path, number: int) -> None:
    for key, want in (
        ("split.no", number),
        ("split.count", _split_value(first_layout, first, "split.count", 1)),
        ("split.tensors.count", _split_value(first_layout, first, "split.tensors.count", -1)),
    ):
        got = _split_value(layout, part, key, -1)
        if got != want:
            raise FormatError(f"{part}: {key} is {got}, expected {want}; this file does not belong to {first.name}")


def _check_total(model: GGUFFile, layout: Layout, first: Path) -> None:
    want = _split_value(layout, first, "split.tensors.count", -1)
    if len(model.tensors) != want:
        raise FormatError(
            f"{first}: split.tensors.count says {want}, but the files hold {len(model.tensors)} tensors; "
            f"one of them belongs to another model"
        )
