"""Weights that clients asked a worker to keep: files named by content, up to a limit of bytes, oldest use out first."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import IO

import numpy as np

from app.engine.kernels.hash import OFFSET_BASIS, fnv1a64
from app.errors import ConfigError

log = logging.getLogger(__name__)

#: FNV-1a 64 collides at will, so the length is part of the name, and both are checked before a file is used.
_NAME = re.compile(r"(?P<hash>[0-9a-f]{16})-(?P<size>\d+)")
_UNFINISHED = ".unfinished"

Key = tuple[int, int]


class WeightCache:
    """A directory of weights. Thread-safe; one process per directory. Raises ConfigError when it cannot be used."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Key, None] = OrderedDict()  # the longest unused first
        self.used_bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._look_around()
        except OSError as error:
            raise ConfigError(f"cannot use --cache-dir {directory}: {error.strerror or error}") from error
        with self._lock:
            self._evict(0)

    def _look_around(self) -> None:
        """Find what earlier runs left; half-written files go."""
        found: list[tuple[int, Key]] = []
        for entry in os.scandir(self._directory):
            if entry.name.endswith(_UNFINISHED):
                os.unlink(entry.path)
            elif match := _NAME.fullmatch(entry.name):
                key = (int(match["hash"], 16), int(match["size"]))
                found.append((entry.stat().st_mtime_ns, key))
        for _, key in sorted(found):
            self._sizes[key] = None
            self.used_bytes += key[1]

    def find(self, content_hash: int, size: int) -> memoryview | None:
        """The bytes with this hash and length, read-only and verified, or None."""
        key = (content_hash, size)
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        path = self._path(key)
        try:
            os.utime(path)
            data = np.memmap(path, np.uint8, "r").data.toreadonly() if size else memoryview(b"")
        except (OSError, ValueError) as error:
            log.warning("lost the cached weight %s: %s", path.name, error)
            self._forget(key)
            return None
        if len(data) != size or fnv1a64(data) != content_hash:
            log.warning("the cached weight %s is damaged; removing it", path.name)
            self._forget(key)
            return None
        return data

    def writer(self, size: int) -> CacheWriter | None:
        """Takes a weight of this size piece by piece, or None when it would not fit or cannot be written."""
        if not 0 < size <= self._limit_bytes:
            return None
        try:
            handle, name = tempfile.mkstemp(_UNFINISHED, dir=self._directory)
            return CacheWriter(self, os.fdopen(handle, "wb"), Path(name), size)
        except OSError as error:
            log.warning("cannot write to the weight cache: %s", error)
            return None

    def adopt(self, unfinished: Path, key: Key) -> None:
        """Give a complete file its name, after making room. Raises OSError."""
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
                unfinished.unlink()
                return
            self._evict(key[1])
            unfinished.replace(self._path(key))
            self._sizes[key] = None
            self.used_bytes += key[1]

    def _evict(self, coming_bytes: int) -> None:
        """Remove what was unused longest until `coming_bytes` fit. The lock is held."""
        while self._sizes and self.used_bytes + coming_bytes > self._limit_bytes:
            key, _ = self._sizes.popitem(last=False)
            self.used_bytes -= key[1]
            with contextlib.suppress(FileNotFoundError):
                self._path(key).unlink()

    def _forget(self, key: Key) -> None:
        with self._lock:
            if key in self._sizes:
                del self._sizes[key]
                self.used_bytes -= key[1]
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: Key) -> Path:
        return self._directory / f"{key[0]:016x}-{key[1]}"


class CacheWriter:
    """One weight on its way into the cache. `finish` when all pieces were added, `abandon` otherwise.

    A disk that fills up costs the cached copy and nothing else.
    """

    def __init__(self, cache: WeightCache, file: IO[bytes], path: Path, size: int) -> None:
        self._cache = cache
        self._file = file
        self._path = path
        self._size = size
        self._hash = OFFSET_BASIS
        self._failed = False

    def add(self, piece: memoryview) -> None:
        if self._failed:
            return
        try:
            self._file.write(piece)
        except OSError as error:
            log.warning("cannot write to the weight cache: %s", error)
            self._failed = True
        else:
            self._hash = fnv1a64(piece, self._hash)

    def finish(self) -> None:
        if self._failed:
            return self.abandon()
        try:
            self._file.close()
            self._cache.adopt(self._path, (self._hash, self._size))
        except OSError as error:
            log.warning("cannot write to the weight cache: %s", error)
            self.abandon()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
