"""Hashes of weights, computed beside the uploads: one thread per device, so that no worker waits for another's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from app.errors import DeviceLost

_HASH = struct.Struct("<Q")
HASH_BYTES = _HASH.size


class Hasher:
    """Computes in the order asked, at most until `ended` says that nobody needs it any more."""

    def __init__(self, name: str, ended: Callable[[], DeviceLost | None]) -> None:
        self._name = name
        self._ended = ended
        self._pool: ThreadPoolExecutor | None = None

    def compute(self, content_hash: Callable[[], int]) -> Future[bytes]:
        """The hash as it stands on the wire. For one thread at a time."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"rpc-hash-{self._name}")
        return self._pool.submit(self._one, content_hash)

    def close(self) -> None:
        """Drop what was not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, content_hash: Callable[[], int]) -> bytes:
        if (lost := self._ended()) is not None:  # a whole model may be waiting
            raise lost
        return _HASH.pack(content_hash())
