"""Weights that a worker need not be sent: those in its own model files, and those it was asked to keep."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from app.engine.gguf.reader import GGUFFile
from app.engine.kernels.hash import fnv1a64
from app.errors import ConfigError, ModelError
from app.rpc.tensor_hashes import TensorHashes
from app.rpc.weight_cache import CacheWriter, WeightCache

log = logging.getLogger(__name__)

#: Smaller tensors are not worth a question; clients do not ask for them either.
MIN_BYTES = 1 << 12

_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Stamp:
    """How a file stood; the time of change cannot be set back, unlike that of the last write."""

    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class _Place:
    gguf: GGUFFile
    name: str
    stamp: _Stamp | None


class ModelIndex:
    """Every tensor of every GGUF file below a directory, by hash and length.

    Built in a thread of its own: hashing a model for the first time reads all of it; afterwards the hashes are kept in
    `hash_dir`. What is not indexed yet is simply not found.
    """

    def __init__(self, model_dir: Path, hash_dir: Path) -> None:
        if not model_dir.is_dir():
            raise ConfigError(f"--model-dir {model_dir} is not a directory")
        self._model_dir = model_dir
        self._hash_dir = hash_dir
        self._lock = threading.Lock()
        self._places: dict[tuple[int, int], _Place] = {}
        self._verified: set[tuple[int, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._build, name="rpc-model-index", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until every file was looked at."""
        self._thread.join()

    def close(self) -> None:
        """Stop building and let go of the files. Blocks for at most one tensor."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._places.clear()

    def find(self, content_hash: int, size: int) -> memoryview | None:
        """The bytes with this hash and length, read-only and verified, or None."""
        key = (content_hash, size)
        with self._lock:
            place = self._places.get(key)
        if place is None:
            return None
        stamp = _stamp(place.gguf, place.name)
        data = place.gguf.data(place.name)
        if key not in self._verified or stamp != place.stamp:
            # Bytes of a file that has become shorter must not even be touched: the system would end this process.
            if stamp is None or place.stamp is None or stamp.size < place.stamp.size or fnv1a64(data) != content_hash:
                log.warning("%s has changed under %s; not using it", place.gguf.tensor(place.name).path, place.name)
                with self._lock:
                    self._places.pop(key, None)
                return None
            self._verified.add(key)
        return data

    def _build(self) -> None:
        for path in sorted(self._model_dir.rglob("*.gguf")):
            if self._stop.is_set():
                return
            if path.exists() and not path.is_file():  # opening a pipe would wait for whoever writes to it
                log.warning("not indexing %s: it is no regular file", path)
            elif not _LATER_PART.fullmatch(path.name):
                self._add(path)

    def _add(self, path: Path) -> None:
        try:
            gguf = GGUFFile.open(path)
            hashes = TensorHashes(gguf, self._hash_dir)
            try:
                n_tensors = self._add_tensors(gguf, hashes)
            finally:
                hashes.save()
        except (ModelError, OSError) as error:
            log.warning("not indexing %s: %s", path, error)
        else:
            log.info("indexed %s: %d tensors need not be sent", path, n_tensors)

    def _add_tensors(self, gguf: GGUFFile, hashes: TensorHashes) -> int:
        """Index one model; returns how many of its tensors are worth it. Ends early when closed."""
        n_tensors = 0
        for name, info in gguf.tensors.items():
            if self._stop.is_set():
                break
            if info.n_bytes >= MIN_BYTES:
                place = _Place(gguf, name, _stamp(gguf, name))
                key = (hashes.of(name), info.n_bytes)
                n_tensors += 1
                with self._lock:
                    self._places.setdefault(key, place)
        return n_tensors


def _stamp(gguf: GGUFFile, name: str) -> _Stamp | None:
    """Of the file that a tensor lies in; None if it is gone."""
    try:
        status = Path(gguf.tensor(name).path).stat()
    except OSError:
        return None
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class WeightStore:
    """Where a worker looks before a weight is sent to it, and where it puts what it shall keep."""

    def __init__(self, index: ModelIndex | None, cache: WeightCache | None) -> None:
        self._index = index
        self._cache = cache

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look in, so that asking is a waste of time."""
        return self._index is None and self._cache is None

    def find(self, content_hash: int, size: int) -> memoryview | None:
        for place in (self._index, self._cache):
            if place is not None and (data := place.find(content_hash, size)) is not None:
                return data
        return None

    def writer(self, size: int) -> CacheWriter | None:
        return None if self._cache is None else self._cache.writer(size)

    def wait(self) -> None:
        """Block until the index is complete."""
        if self._index is not None:
            self._index.wait()

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
