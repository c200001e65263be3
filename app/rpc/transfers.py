"""How byte ranges of a buffer become commands: frames, safe sizes, and the few small writes that travel together."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from app.rpc.link import RpcBuffer
from app.rpc.messages import GetTensor, ReadRegion, SetTensor
from app.rpc.protocol import encode
from app.rpc.wire import REQUEST_HEADER, Command, region

#: Writes up to this size are copied and wait for the next command, with which they leave in one system call.
SMALL_BYTES = 4096

#: As many bytes of small writes wait at most.
MAX_WAITING_BYTES = 64 << 10

#: A tensor record names at most 4 GiB; a stock worker holds one whole SET_TENSOR body besides the device's memory.
CHUNK_BYTES = 1 << 30

#: A stock 6.0 worker with a cache writes every longer SET_TENSOR to its disk, whatever it is.
CHUNK_BYTES_6_0 = 10 << 20

#: So many encoded heads are kept per buffer.
MAX_FRAMES = 256

BATCH_ITEM = struct.Struct("<QI")


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


class SmallWrites:
    """Small writes of one device that have not left yet. They are copied in, so their memory is free at once.

    A Tandem worker gets them as one WRITE_BATCH, a stock one as SET_TENSOR commands in a row.
    """

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self._bytes = bytearray(REQUEST_HEADER.size if batched else 0)
        self._count = 0

    def __len__(self) -> int:
        return len(self._bytes) if self._count else 0

    def add(self, buffer: RpcBuffer, offset: int, payload: memoryview) -> None:
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
        self._bytes += head
        self._bytes += payload
        self._count += 1

    def take(self) -> tuple[bytearray, int]:
        """Everything that waits, as wire bytes, and how many commands that is."""
        if not self._count:
            return bytearray(), 0
        taken, count = self._bytes, self._count
        if self._batched:
            REQUEST_HEADER.pack_into(taken, 0, Command.WRITE_BATCH, len(taken) - REQUEST_HEADER.size)
            count = 1
        self._bytes = bytearray(REQUEST_HEADER.size if self._batched else 0)
        self._count = 0
        return taken, count
