"""FNV-1a 64 of a model's tensors, computed once per file and kept in a small file between starts.

Both ends use it: the control plane to offer weights by their hash, a worker to find them in its own model files. The
kept file is believed only while the model file's size and modification time are those it was made from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from pathlib import Path

from app.engine.gguf.reader import GGUFFile
from app.engine.kernels.hash import fnv1a64

log = logging.getLogger(__name__)

_FORMAT = 1

#: While hashes are computed one after the other, they are written down this often, and when `save` is called.
SAVE_EVERY_S = 5.0


class TensorHashes:
    """The hashes of one model, split or not. `directory` holds the kept files and is made when needed. Thread-safe.

    Not every tensor is asked for, so only who asks knows when the last was: `save` then.
    """

    def __init__(self, gguf: GGUFFile, directory: Path) -> None:
        self._gguf = gguf
        self._lock = threading.Lock()
        self._files: dict[str, _KeptFile] = {}
        for info in gguf.tensors.values():
            if info.path not in self._files:
                self._files[info.path] = _KeptFile(Path(info.path), directory)

    def of(self, name: str) -> int:
        """The hash of a tensor's bytes; reads all of them the first time. Raises FormatError for an unknown name."""
        kept = self._files[self._gguf.tensor(name).path]
        with self._lock:
            known = kept.hashes.get(name)
        if known is None:
            known = fnv1a64(self._gguf.data(name))
            with self._lock:
                kept.add(name, known)
        return known

    def save(self) -> None:
        """Write down what was computed since the last time."""
        with self._lock:
            for kept in self._files.values():
                kept.save()


class _KeptFile:
    """The hashes of one model file, and where they are written down."""

    def __init__(self, path: Path, directory: Path) -> None:
        absolute = path.resolve()
        stat = absolute.stat()
        digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
        self._made_from = {"format": _FORMAT, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        self._kept_in = directory / f"{path.name}.{digest}.json"
        self._saved_at = time.monotonic()
        self._is_saved = True
        self.hashes: dict[str, int] = self._load()

    def _load(self) -> dict[str, int]:
        try:
            kept = json.loads(self._kept_in.read_text(encoding="utf-8"))
            if {key: kept[key] for key in self._made_from} != self._made_from:
                return {}
            return {str(name): int(value, 16) for name, value in kept["hashes"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("ignoring unreadable hashes in %s: %s", self._kept_in, error)
            return {}

    def add(self, name: str, value: int) -> None:
        self.hashes[name] = value
        self._is_saved = False
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file anew if there is anything new; one that cannot be written is told in the log alone."""
        if self._is_saved:
            return
        self._is_saved = True
        self._saved_at = time.monotonic()
        text = json.dumps({**self._made_from, "hashes": {name: f"{h:016x}" for name, h in self.hashes.items()}})
        unfinished = self._kept_in.with_name(f"{self._kept_in.name}.{os.getpid()}.tmp")
        try:
            self._kept_in.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._kept_in)
        except OSError as error:  # they will be computed again next time
            log.warning("cannot keep hashes in %s: %s", self._kept_in, error)
