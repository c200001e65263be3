"""How byte ranges of a buffer become commands: frames, safe sizes, and the few small writes that travel together."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from app.rpc.link import RpcBuffer
from app.rpc.messages import GetTensor, ReadRegion, SetTensor
from app.rpc.protocol import encode
from app.rpc.wire import REQUEST_HEADER, Command, region

#: Writes up to this size are copied and wait for the next command, with which they leave in one system call: all that
#: a decode step of a few sequences brings, so that it is one turn. Copying them costs less than a call of their own.
SMALL_BYTES = 32 << 10

#: As many bytes of small writes wait at most.
MAX_WAITING_BYTES = 64 << 10

#: A tensor record names at most 4 GiB; a stock worker holds one whole SET_TENSOR body besides the device's memory.
CHUNK_BYTES = 1 << 30

#: A stock 6.0 worker with a cache writes every longer SET_TENSOR to its disk, whatever it is.
CHUNK_BYTES_6_0 = 10 << 20

#: So many encoded heads are kept per buffer.
MAX_FRAMES = 256

BATCH_ITEM = struct.Struct("<QI")
#: What GRAPH_RUN says: device and graph.
GRAPH_NAME = struct.Struct("<IQ")


def chunks(size_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Offsets and sizes that cover `size_bytes` in order."""
    for start in range(0, size_bytes, chunk_bytes):
        yield start, min(chunk_bytes, size_bytes - start)


def set_frame(buffer: RpcBuffer, offset: int, size_bytes: int, *, cache: int = 0) -> bytes:
    """A SET_TENSOR up to its data."""
    place = buffer.address
    tensor = region(place.remote_ptr, place.base + offset, size_bytes)
    return encode(SetTensor(tensor, cache, 0), buffer.link.peer.version, size_bytes)


def get_frame(buffer: RpcBuffer, offset: int, size_bytes: int) -> bytes:
    """The shortest command that reads a range from this worker."""
    place, peer = buffer.address, buffer.link.peer
    if peer.is_tandem:
        return encode(ReadRegion(place.base + offset, size_bytes), peer.version)
    return encode(GetTensor(region(place.remote_ptr, place.base + offset, size_bytes), 0, size_bytes), peer.version)


@dataclass(frozen=True, slots=True)
class Late:
    """The bytes of the last small write, where they are still on their way. `sent` resolves when they have left."""

    payload: Future[Any]
    size_bytes: int
    sent: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class TurnParts:
    """What a turn begins with. `late` belongs behind `items`; `otherwise` are commands of their own that do the same,
    or, where something is late, what can be done without it; `around` are those that do the same around it.
    """

    device: int
    graph_id: int
    items: bytearray
    otherwise: bytearray
    late: Late | None = None
    around: tuple[bytearray, bytearray] | None = None

    @property
    def late_bytes(self) -> int:
        return 0 if self.late is None else self.late.size_bytes


@dataclass(frozen=True, slots=True)
class Riding:
    """Commands in a row, as wire bytes and by name. `late` belongs behind them; `otherwise` is all but that write."""

    frame: bytearray
    commands: tuple[str, ...]
    late: Late
    otherwise: bytearray


class Riders:
    """Small commands that wait for the next one and leave with it: writes, whose bytes are copied, masks, and runs.

    To a Tandem worker writes in a row travel as one WRITE_BATCH, to a stock worker as SET_TENSOR commands in a row.
    """

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self._bytes = bytearray()
        self._commands: list[str] = []
        #: Where the batch begins to which writes are still added; -1: there is none.
        self._batch_at = -1
        #: Where the run begins, if a batch at most and a run are all there is; -1 otherwise.
        self._run_at = -1
        #: What the last write waits for, where its batch begins, where what comes behind it does, as how many commands.
        self.late: Late | None = None
        self._late_batch_at = self._late_at = self._n_to_late = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def add_write(self, buffer: RpcBuffer, offset: int, payload: memoryview) -> None:
        size = len(payload)
        key = (offset, size)
        head = buffer.frames.get(key)
        if head is None:
            head = (
                BATCH_ITEM.pack(buffer.address.base + offset, size)
                if self._batched
                else set_frame(buffer, offset, size)
            )
            if len(buffer.frames) >= MAX_FRAMES:
                buffer.frames.clear()
            buffer.frames[key] = head
        if self._batch_at < 0:
            self._run_at = -1
            self._commands.append("SET_TENSOR")
            if self._batched:
                self._batch_at = len(self._bytes)
                self._bytes += bytes(REQUEST_HEADER.size)
        self._bytes += head
        self._bytes += payload

    def add_late_write(self, buffer: RpcBuffer, offset: int, late: Late) -> None:
        """A write whose bytes will come. Only runs may follow; before anything else `take_late` must be called."""
        if self._batch_at < 0:
            self._run_at = -1
            self._commands.append("SET_TENSOR")
            self._batch_at = len(self._bytes)
            self._bytes += bytes(REQUEST_HEADER.size)
        self._bytes += BATCH_ITEM.pack(buffer.address.base + offset, late.size_bytes)
        self._late_batch_at = self._batch_at
        self._close_batch(late.size_bytes)
        self.late, self._late_at, self._n_to_late = late, len(self._bytes), len(self._commands)

    def take_late(self) -> Riding | None:
        """Everything up to a write whose bytes are on their way, if there is one."""
        if self.late is None:
            return None
        late, otherwise = self.late, self._without_late()
        frame, self._bytes = self._bytes[: self._late_at], self._bytes[self._late_at :]
        n = self._n_to_late
        commands, self._commands = self._commands[:n], self._commands[n:]
        self.late, self._run_at = None, -1
        return Riding(frame, tuple(commands), late, otherwise)

    def _without_late(self) -> bytearray:
        """What comes before the late write; the batch is one item shorter, or not there."""
        before = self._bytes[: self._late_at - BATCH_ITEM.size]
        body_bytes = len(before) - self._late_batch_at - REQUEST_HEADER.size
        if not body_bytes:
            return before[: self._late_batch_at]
        REQUEST_HEADER.pack_into(before, self._late_batch_at, Command.WRITE_BATCH, body_bytes)
        return before

    def add_mask(self, command: str, frame: bytes) -> None:
        """A whole command that writes a mask."""
        self._close_batch()
        self._run_at = -1
        self._bytes += frame
        self._commands.append(command)

    def add_run(self, command: str, frame: bytes) -> None:
        """A whole command that runs a kept graph."""
        is_first_run = self._commands == ["SET_TENSOR"] * (self._batch_at == 0 or self.late is not None)
        self._close_batch()
        self._run_at = len(self._bytes) if is_first_run else -1
        self._bytes += frame
        self._commands.append(command)

    def take(self) -> tuple[bytearray, tuple[str, ...]]:
        """Everything that waits, as wire bytes, and which commands that is."""
        self._close_batch()
        taken, commands = self._bytes, tuple(self._commands)
        self._bytes, self._commands, self._run_at = bytearray(), [], -1
        return taken, commands

    def take_turn(self) -> TurnParts | None:
        """Everything that waits, if it is what a turn begins with: writes, or none, and a run."""
        run_at, late = self._run_at, self.late
        if run_at < 0:
            return None
        otherwise = None if late is None else self._without_late()
        self.late = None
        taken, _ = self.take()
        around = None if late is None else (taken[: self._late_at], taken[self._late_at :])
        device, graph_id = GRAPH_NAME.unpack_from(taken, run_at + REQUEST_HEADER.size)
        items = taken[REQUEST_HEADER.size : run_at]
        return TurnParts(device, graph_id, items, taken if otherwise is None else otherwise, late, around)

    def _close_batch(self, late_bytes: int = 0) -> None:
        if self._batch_at >= 0:
            body_bytes = len(self._bytes) - self._batch_at - REQUEST_HEADER.size + late_bytes
            REQUEST_HEADER.pack_into(self._bytes, self._batch_at, Command.WRITE_BATCH, body_bytes)
            self._batch_at = -1
