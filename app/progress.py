"""Progress of a long transfer: a bar with speed and time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

MIB = 1 << 20

#: Plain lines come this far apart.
_PLAIN_EVERY_S = 5.0

Advance = Callable[[int], None]


@contextmanager
def transfer(label: str, total_bytes: int, *, done_bytes: int = 0, stream: TextIO | None = None) -> Iterator[Advance]:
    """Yields a function to be told of every further byte. Writes to stderr."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        with _bar(stream) as bar:
            task = bar.add_task(label, total=total_bytes, completed=done_bytes)
            yield lambda n_bytes: bar.advance(task, n_bytes)
    else:
        plain = _Plain(label, total_bytes, done_bytes, stream)
        yield plain.advance
        plain.finish()


def _bar(stream: TextIO) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=stream))


class _Plain:
    """Lines for logs: one at the start, one every few seconds, one at the end."""

    def __init__(self, label: str, total_bytes: int, done_bytes: int, stream: TextIO) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = self._start_bytes = done_bytes
        self._stream = stream
        self._start_s = self._told_s = time.monotonic()
        self._tell(f"{total_bytes / MIB:.1f} MiB")

    def advance(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        now = time.monotonic()
        if now - self._told_s < _PLAIN_EVERY_S:
            return
        self._told_s = now
        left_s = (self._total_bytes - self._done_bytes) / max(self._speed(now), 1.0)
        share = self._done_bytes / max(self._total_bytes, 1)
        self._tell(f"{share:.0%}, {self._speed(now) / MIB:.1f} MiB/s, {left_s:.0f} s left")

    def finish(self) -> None:
        self._tell(f"done, {self._speed(time.monotonic()) / MIB:.1f} MiB/s")

    def _speed(self, now: float) -> float:
        """Bytes per second since the start."""
        return (self._done_bytes - self._start_bytes) / max(now - self._start_s, 1e-3)

    def _tell(self, what: str) -> None:
        print(f"{self._label}: {what}", file=self._stream, flush=True)
