"""The buffers of one client, and the checks that stand between what it names and memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.engine.program import Buffer
from app.errors import RemoteProtocolError
from app.rpc.lower import Mapped, locate_tensor
from app.rpc.station import Station
from app.rpc.wire import RpcTensor

#: Checked byte ranges kept per client: the same few repeat with every token.
MAX_SPOTS = 4096


@dataclass(frozen=True, slots=True)
class Spot:
    """A checked byte range: it starts here and its size was seen to fit."""

    station: Station
    buffer: Buffer
    offset: int


class Holdings:
    """Buffers by the handles that the client was told. `new_address` gives a handle and a base never used before."""

    def __init__(self, stations: Sequence[Station], new_address: Callable[[int], tuple[int, int]]) -> None:
        self._stations = stations
        self._new_address = new_address
        self._buffers: dict[int, Mapped] = {}
        self._bases: list[tuple[int, int]] = []  # (base, handle), sorted
        self._spots: dict[object, Spot] = {}

    @property
    def buffers(self) -> Mapping[int, Mapped]:
        return self._buffers

    def __iter__(self) -> Iterator[Mapped]:
        return iter(self._buffers.values())

    def station(self, device: int) -> Station:
        """Raises RemoteProtocolError for a device that does not exist."""
        if device >= len(self._stations):
            raise RemoteProtocolError(f"device {device} does not exist, this worker has {len(self._stations)}")
        return self._stations[device]

    def alloc(self, device: int, size_bytes: int) -> int | None:
        """A new buffer's handle, or None when there is no memory for it."""
        buffer = self.station(device).alloc(size_bytes)
        if buffer is None:
            return None
        handle, base = self._new_address(size_bytes)
        self._buffers[handle] = Mapped(buffer, base, device)
        bisect.insort(self._bases, (base, handle))
        return handle

    def mapped(self, handle: int) -> Mapped:
        """Raises RemoteProtocolError for what is not, or no longer, this client's."""
        mapped = self._buffers.get(handle)
        if mapped is None:
            raise RemoteProtocolError(f"buffer {handle:#x} is not one of this client's")
        return mapped

    def free(self, handle: int) -> None:
        mapped = self.mapped(handle)
        del self._buffers[handle]
        self._bases.remove((mapped.base, handle))
        self._spots.clear()
        self._stations[mapped.device].free(mapped.buffer)

    def free_all(self) -> None:
        for handle in list(self._buffers):
            self.free(handle)

    def range(self, tensor: RpcTensor, offset: int, size: int) -> Spot:
        """A byte range inside a tensor inside a buffer of this client. Raises RemoteProtocolError."""
        key = (tensor, offset, size)
        spot = self._spots.get(key)
        if spot is None:
            mapped, start, n_bytes = locate_tensor(tensor, self._buffers)
            if offset + size > n_bytes:
                raise RemoteProtocolError(f"{size} bytes at offset {offset} do not lie inside a tensor of {n_bytes}")
            spot = self._remember(key, mapped, start + offset)
        return spot

    def at(self, address: int, size: int) -> Spot:
        """A byte range at an absolute address. Raises RemoteProtocolError."""
        key = (address, size)
        spot = self._spots.get(key)
        if spot is None:
            i = bisect.bisect_right(self._bases, (address, 1 << 64)) - 1
            mapped = self._buffers[self._bases[i][1]] if i >= 0 else None
            if mapped is None or address + size > mapped.base + mapped.buffer.size_bytes:
                raise RemoteProtocolError(f"{size} bytes at address {address:#x} lie in no buffer of this client")
            spot = self._remember(key, mapped, address - mapped.base)
        return spot

    def _remember(self, key: object, mapped: Mapped, offset: int) -> Spot:
        if len(self._spots) >= MAX_SPOTS:
            self._spots.clear()
        spot = self._spots[key] = Spot(self._stations[mapped.device], mapped.buffer, offset)
        return spot
