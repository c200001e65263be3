"""What devices in this machine's memory share: aligned buffers, accounting, one lane, and checks before the lane."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from app.engine.device import (
    Device,
    DeviceCaps,
    DeviceMemory,
    Handle,
    Payload,
    WeightHint,
    check_mask_place,
    check_target,
)
from app.engine.devices.host_memory import host_memory
from app.engine.lane import Lane
from app.engine.mask import MaskRecipe
from app.engine.opcheck import check_program
from app.engine.program import Buffer, Program
from app.engine.rows import F32_BYTES, RowSelection
from app.errors import DeviceError, DeviceLost, InternalError, OutOfDeviceMemory

Memory: TypeAlias = NDArray[np.uint8]
T = TypeVar("T")

ALIGNMENT_BYTES = 64
MAX_BUFFER_BYTES = 1 << 62


class HostBuffer(Buffer):
    """Aligned host memory from `address` on, zeros at first.

    `memory` is None once the lane has freed it, `is_freed` as soon as that is asked for. While `is_blank`, nobody has
    been given its bytes: they are zeros that the system need not have provided yet.
    """

    __slots__ = ("address", "device", "handles", "is_blank", "is_freed", "memory")

    def __init__(self, device: HostDevice, size_bytes: int) -> None:
        super().__init__(device.name, size_bytes)
        self.device = device
        raw = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        self.address = raw.ctypes.data + start
        self.memory: Memory | None = raw[start : start + size_bytes]
        self.is_blank = True
        self.is_freed = False
        self.handles: WeakSet[HostHandle] = WeakSet()

    def drop(self) -> None:
        """Give the memory back and make programs that use it unusable; their views would keep it alive."""
        self.is_freed = True
        self.memory = None
        for handle in self.handles:
            handle.retire("a buffer that it uses was freed")


class HostHandle(Handle):
    """A prepared program. `unusable` says why it may not run any more."""

    __slots__ = ("device", "unusable")

    def __init__(self, device: HostDevice, program_name: str) -> None:
        super().__init__(program_name)
        self.device = device
        self.unusable: str | None = None

    def retire(self, reason: str) -> None:
        """Make it unusable and let go of memory. The first reason is kept."""
        self.unusable = self.unusable or reason
        self.let_go()

    def run(self) -> None:
        if self.unusable is not None:
            raise DeviceError(f"device {self.device.name} cannot run {self.program_name}: {self.unusable}")
        self.work()

    @abstractmethod
    def work(self) -> None:
        """Compute everything once; in lane order."""

    @abstractmethod
    def let_go(self) -> None:
        """Drop all references to buffers' memory."""


class HostDevice(Device):
    """See `Device`. Errors of arguments (bounds, freed or foreign buffers) are raised at once, as DeviceError.

    With `memory_limit_bytes` the device reports that limit as its memory and refuses to go beyond it.
    """

    selects_rows = True
    builds_masks = True

    def __init__(self, name: str, caps: DeviceCaps, memory_limit_bytes: int | None) -> None:
        self.name = name
        self.caps = caps
        self._limit_bytes = memory_limit_bytes
        self._lock = threading.Lock()
        self._buffers: set[HostBuffer] = set()
        self._allocated_bytes = 0
        self._is_closed = False
        self._lane = Lane(name)

    # Memory.

    def memory(self) -> DeviceMemory:
        self._require_open()
        if self._limit_bytes is not None:
            return DeviceMemory(max(0, self._limit_bytes - self._allocated_bytes), self._limit_bytes)
        host = host_memory()
        return DeviceMemory(min(host.free_bytes, max(0, host.total_bytes - self._allocated_bytes)), host.total_bytes)

    def alloc(self, size_bytes: int) -> HostBuffer:
        self._require_open()
        if size_bytes < 0:
            raise DeviceError(f"device {self.name}: a buffer of {size_bytes} bytes makes no sense")
        if not self._reserve(size_bytes):
            self._lane.call(lambda: None).result()  # frees may still be waiting in the lane
            if not self._reserve(size_bytes):
                raise OutOfDeviceMemory(self.name, size_bytes, self.memory().free_bytes)
        try:
            buffer = HostBuffer(self, size_bytes)
        except MemoryError as error:
            self._give_back(size_bytes)
            raise OutOfDeviceMemory(self.name, size_bytes, self.memory().free_bytes) from error
        with self._lock:
            self._buffers.add(buffer)
        return buffer

    def _reserve(self, size_bytes: int) -> bool:
        with self._lock:
            if size_bytes > self.memory().free_bytes:
                return False
            self._allocated_bytes += size_bytes
            return True

    def _give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._allocated_bytes -= size_bytes

    def free(self, buffer: Buffer) -> None:
        mine = self._own(buffer)
        mine.is_freed = True

        def work() -> None:
            self._forget(mine)
            mine.drop()
            with self._lock:
                self._buffers.discard(mine)
                self._allocated_bytes -= mine.size_bytes

        self._lane.submit(work)

    def _own(self, buffer: Buffer) -> HostBuffer:
        """The buffer as ours. Raises DeviceError for buffers of other devices and for freed ones."""
        if not isinstance(buffer, HostBuffer) or buffer.device is not self:
            raise DeviceError(f"device {self.name} was given {buffer!r}, which is not one of its buffers")
        if buffer.is_freed:
            raise DeviceError(f"device {self.name} was given {buffer!r}, which was freed")
        return buffer

    def _region(self, buffer: Buffer, offset: int, size_bytes: int, *, replaced: bool = False) -> Callable[[], Memory]:
        """A function that gives the bytes of a region when the lane gets there. Raises DeviceError out of bounds.

        `replaced`: the caller will overwrite all of it.
        """
        mine = self._own(buffer)
        if offset < 0 or size_bytes < 0 or offset + size_bytes > mine.size_bytes:
            raise DeviceError(
                f"device {self.name}: bytes {offset} to {offset + size_bytes} are not in a buffer of {mine.size_bytes}"
            )

        def bytes_now() -> Memory:
            if mine.memory is None:
                raise InternalError(f"device {self.name}: {mine!r} was freed out of order")
            if size_bytes:
                mine.is_blank = False
                self._give_out(mine.address + offset, size_bytes, replaced)
            return mine.memory[offset : offset + size_bytes]

        return bytes_now

    def _give_out(self, address: int, size_bytes: int, replaced: bool) -> None:
        """In lane order: bytes are about to be read or changed from outside; they must be what the outside wrote."""

    def _forget(self, buffer: HostBuffer) -> None:
        """In lane order: the buffer's memory is about to go away."""

    # Bytes in and out.

    def write(
        self,
        buffer: Buffer,
        offset: int,
        payload: Payload | Future[Payload],
        *,
        size_bytes: int | None = None,
        hint: WeightHint | None = None,
    ) -> Future[None]:
        del hint  # what becomes of a weight is decided when a program uses it
        self._require_open()
        if isinstance(payload, Future):
            if size_bytes is None:
                raise DeviceError(f"device {self.name}: a write of a future's bytes must say how many they will be")
            return self._write_later(self._region(buffer, offset, size_bytes, replaced=True), payload, size_bytes)
        data = np.frombuffer(payload, np.uint8)
        if size_bytes is not None and size_bytes != data.size:
            raise DeviceError(f"device {self.name}: a write of {size_bytes} bytes came with {data.size}")
        target = self._region(buffer, offset, data.size, replaced=True)
        return self._lane.call(lambda: np.copyto(target(), data))

    def _write_later(self, target: Callable[[], Memory], payload: Future[Payload], size_bytes: int) -> Future[None]:
        def work() -> None:
            data = np.frombuffer(self._lane.wait_for(payload), np.uint8)
            if data.size != size_bytes:
                raise DeviceError(f"device {self.name}: a write of {size_bytes} bytes was handed {data.size}")
            np.copyto(target(), data)

        return self._lane.call(work)

    def write_mask(self, buffer: Buffer, offset: int, recipe: MaskRecipe) -> Future[None]:
        self._require_open()
        check_mask_place(self.name, offset)
        target = self._region(buffer, offset, recipe.n_bytes, replaced=True)
        return self._lane.call(lambda: recipe.build(target().view(np.uint16).reshape(recipe.shape)))

    def read(self, buffer: Buffer, offset: int, size_bytes: int, into: memoryview | None = None) -> Future[memoryview]:
        self._require_open()
        source = self._region(buffer, offset, size_bytes)
        check_target(self.name, into, size_bytes)

        def work() -> memoryview:
            result = memoryview(bytearray(size_bytes)) if into is None else into
            np.copyto(np.frombuffer(result, np.uint8), source())
            return result

        return self._lane.call(work, surfaces=True)

    def read_rows(
        self, buffer: Buffer, offset: int, rows: RowSelection, into: memoryview | None = None
    ) -> Future[memoryview]:
        self._require_open()
        source = self._rows(buffer, offset, rows, into)
        return self._lane.call(lambda: rows.select(source().data, into), surfaces=True)

    def _rows(self, buffer: Buffer, offset: int, rows: RowSelection, into: memoryview | None) -> Callable[[], Memory]:
        """As `_region`, for rows that somebody wants something of. Raises DeviceError for what nobody can want."""
        source = self._region(buffer, offset, rows.source_bytes)
        if (flaw := rows.flaw()) is not None or offset % F32_BYTES:
            raise DeviceError(f"device {self.name}: {flaw or f'rows cannot begin at byte {offset}'}")
        check_target(self.name, into, rows.n_bytes)
        return source

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, size_bytes: int) -> None:
        self._require_open()
        origin = self._region(source, source_offset, size_bytes)
        goal = self._region(target, target_offset, size_bytes, replaced=True)
        if source is target and abs(source_offset - target_offset) < size_bytes:
            raise DeviceError(
                f"device {self.name}: a copy of {size_bytes} bytes from {source_offset} to {target_offset} "
                f"of one buffer overlaps itself"
            )
        self._lane.submit(lambda: np.copyto(goal(), origin()))

    def fill(self, buffer: Buffer, offset: int, size_bytes: int, value: int) -> None:
        self._require_open()
        if not 0 <= value <= 255:
            raise DeviceError(f"device {self.name}: {value} is not a byte")
        goal = self._region(buffer, offset, size_bytes, replaced=True)
        mine = self._own(buffer)

        def work() -> None:
            if value or not mine.is_blank:  # a large cache is cleared before use; no need to touch all its pages
                goal().fill(value)

        self._lane.submit(work)

    # Programs.

    def prepare(self, program: Program) -> HostHandle:
        self._require_open()
        buffers = {tensor.buffer for tensor in program.tensors if tensor.buffer is not None}
        mine = {buffer: self._own(buffer) for buffer in buffers}
        check_program(program, self.name)
        handle = self._bind(program)
        for buffer in mine.values():
            buffer.is_blank = False
            buffer.handles.add(handle)
        return handle

    @abstractmethod
    def _bind(self, program: Program) -> HostHandle:
        """A checked program made ready to run. Raises UnsupportedOp."""

    def _memory_of(self, buffer: Buffer) -> Memory:
        """All bytes of a buffer where they lie, for programs."""
        mine = self._own(buffer)
        if mine.memory is None:
            raise InternalError(f"device {self.name}: {mine!r} was freed out of order")
        return mine.memory

    def run(self, handle: Handle) -> None:
        self._require_open()
        mine = self._own_handle(handle)
        self._lane.submit(mine.run)

    def release(self, handle: Handle) -> None:
        self._require_open()
        mine = self._own_handle(handle)
        self._lane.submit(lambda: mine.retire("it was released"))

    def _own_handle(self, handle: Handle) -> HostHandle:
        if not isinstance(handle, HostHandle) or handle.device is not self:
            raise DeviceError(f"device {self.name} was given {handle.program_name}, which it did not prepare")
        return handle

    # Order and end.

    def record(self) -> Future[None]:
        self._require_open()
        return self._lane.mark()

    def if_idle(self, work: Callable[[], T], otherwise: T) -> T:
        """Do something in this thread, if the lane has nothing to do; else `otherwise`."""
        self._require_open()
        return self._lane.do_if_idle(work, otherwise)

    def allow_blocking(self, allowed: bool = True) -> None:
        self._lane.allow_blocking(allowed)

    def host_view(self, buffer: Buffer, offset: int, size_bytes: int) -> memoryview:
        self._require_open()
        region = self._lane.do(self._region(buffer, offset, size_bytes))
        return region.data

    def close(self) -> None:
        self._is_closed = True
        self._lane.close()
        with self._lock:
            buffers, self._buffers = self._buffers, set()
            self._allocated_bytes = 0
        for buffer in buffers:
            self._forget(buffer)
            buffer.drop()

    def _require_open(self) -> None:
        if self._is_closed:
            raise DeviceLost(self.name, "the device was closed")
