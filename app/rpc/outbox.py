"""The queue of commands that are not written yet: order, gates and lane errors, without any I/O.

A gated command holds its place until its future resolves, and everything behind it waits too. The future's value is the
command's payload; `SKIP` drops the command; an error drops it and is remembered by the lane, whose next surfacing
command (a read or an event) fails with it instead of being sent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Final

from app.errors import DeviceError
from app.rpc.awaited import Awaited

#: A gate's value that says: do not send this command after all.
SKIP: Final = object()

#: One system call takes about this many buffers (a command has one or two) and, beyond the first, payload bytes.
MAX_BATCH_BUFFERS = 256
MAX_BATCH_BYTES = 256 << 10


@dataclass(slots=True)
class LaneState:
    """What has gone wrong in one device's lane and was not reported yet."""

    error: BaseException | None = None

    def take(self) -> BaseException | None:
        error, self.error = self.error, None
        return error


@dataclass(slots=True, eq=False)
class Answer:
    """An answer that is waited for. `into` takes the body if given; `decode` turns a body into the future's value."""

    command: str
    least: int
    most: int
    future: Awaited[Any]
    into: memoryview | None = None
    decode: Callable[[memoryview], Any] | None = None
    written_at: float = 0.0

    def written(self, at: float) -> None:
        """The question is on the wire, or about to be: the answer can be waited for there."""
        self.written_at = at
        self.future.on_wire = True


@dataclass(slots=True, eq=False)
class Entry:
    """One command on its way out. `frame` is everything but the payload, `sent` resolves when all bytes have left.

    `riders` are commands in front of it in the same frame; `remainder` is sent even when the command itself is not.
    `around`: what is sent instead of that, around the payload, if that has come.
    """

    command: str
    frame: bytes | bytearray
    payload: memoryview | None = None
    payload_bytes: int = 0
    gate: Future[Any] | None = None
    sent: Future[None] | None = None
    answer: Answer | None = None
    lane: LaneState | None = None
    surfaces: bool = False
    riders: tuple[str, ...] = ()
    remainder: bytes | bytearray = b""
    around: tuple[bytearray, bytearray] | None = None

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for this command."""
        if self.sent is not None:
            settle(self.sent, error=error)
        if self.answer is not None:
            settle(self.answer.future, error=error)


@dataclass(slots=True)
class Batch:
    """What one system call shall send, and what was settled on the way."""

    entries: list[Entry] = field(default_factory=list)
    buffers: list[bytes | bytearray | memoryview] = field(default_factory=list)
    n_bytes: int = 0
    failed: list[tuple[Entry, BaseException]] = field(default_factory=list)
    skipped: list[Entry] = field(default_factory=list)

    def fail(self, entry: Entry, error: BaseException) -> None:
        self.failed.append((entry, error))
        self._add_remainder(entry)

    def skip(self, entry: Entry) -> None:
        self.skipped.append(entry)
        self._add_remainder(entry)

    def _add_remainder(self, entry: Entry) -> None:
        pieces: list[bytes | bytearray | memoryview] = [entry.remainder]
        if entry.around is not None and entry.payload is not None:
            before, behind = entry.around
            pieces = [before, entry.payload, behind]
        for piece in pieces:
            if piece:
                self.buffers.append(piece)
                self.n_bytes += len(piece)


class Outbox:
    """Entries in order. Not thread-safe: the dispatcher's lock guards it."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        self._entries.append(entry)

    def drain(self) -> list[Entry]:
        """Everything that will never be sent."""
        left = list(self._entries)
        self._entries.clear()
        return left

    def next_batch(self, pending: deque[Answer]) -> Batch | None:
        """The next commands to send, or None while the first one waits for its gate or nothing is queued.

        Expected answers are appended to `pending` in wire order.
        """
        batch = Batch()
        while self._entries and len(batch.buffers) < MAX_BATCH_BUFFERS and batch.n_bytes < MAX_BATCH_BYTES:
            entry = self._entries[0]
            if entry.gate is not None and not entry.gate.done():
                break
            self._entries.popleft()
            self._admit(entry, batch, pending)
        return batch if batch.buffers or batch.failed or batch.skipped else None

    def _admit(self, entry: Entry, batch: Batch, pending: deque[Answer]) -> None:
        lane = entry.lane
        if entry.gate is not None:
            try:
                wanted = self._open(entry, entry.gate.result())
            except (Exception, CancelledError) as error:
                if lane is not None and lane.error is None:
                    lane.error = error
                known = lane.take() if lane is not None and entry.surfaces else None
                batch.fail(entry, known or error)
                return
            if not wanted:
                batch.skip(entry)
                return
        if entry.surfaces and lane is not None and (known := lane.take()) is not None:
            batch.fail(entry, known)
            return
        batch.entries.append(entry)
        batch.buffers.append(entry.frame)
        batch.n_bytes += len(entry.frame) + entry.payload_bytes
        if entry.payload_bytes and entry.payload is not None:
            batch.buffers.append(entry.payload)
        if entry.answer is not None:
            pending.append(entry.answer)

    @staticmethod
    def _open(entry: Entry, value: Any) -> bool:
        """Take a gate's value as payload; False when the command shall not be sent."""
        if value is SKIP:
            return False
        if entry.payload_bytes == 0:
            return True
        payload = memoryview(value).cast("B")
        if len(payload) != entry.payload_bytes:
            raise DeviceError(
                f"a payload of {entry.payload_bytes} bytes was announced for {entry.command}, {len(payload)} came"
            )
        entry.payload = payload
        return True


def settle(future: Future[Any], value: Any = None, *, error: BaseException | None = None) -> None:
    """Resolve a future that its waiter may have cancelled."""
    if future.done():
        return
    if not future.running() and not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def now() -> float:
    return time.perf_counter()
