"""A local device as a worker offers it to its clients: shared, with a limit on the memory they may take."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from app.engine.device import Device, DeviceMemory, Handle
from app.engine.program import Buffer
from app.errors import OutOfDeviceMemory

#: Host memory in larger pieces comes fresh from the system, which has zeroed it; smaller ones are used again.
RECYCLED_BYTES = 64 << 20


class Station:
    """One device with its accounts. Thread-safe."""

    def __init__(self, device: Device, limit_bytes: int | None) -> None:
        self.device = device
        device.allow_blocking()
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What all clients together have allocated."""
        return self._used_bytes

    def memory(self) -> DeviceMemory:
        """What clients can still get, and what they could get at most."""
        device = self.device.memory()
        if self._limit_bytes is None:
            return device
        left = max(self._limit_bytes - self._used_bytes, 0)
        return DeviceMemory(min(left, device.free_bytes) if device.total_bytes else left, self._limit_bytes)

    def alloc(self, size_bytes: int) -> Buffer | None:
        """Memory for a client, free of what others left in it, or None when the limit or the device refuses."""
        if size_bytes > self.device.caps.max_buffer_bytes:
            return None
        with self._lock:
            if self._limit_bytes is not None and self._used_bytes + size_bytes > self._limit_bytes:
                return None
            self._used_bytes += size_bytes
        try:
            buffer = self.device.alloc(size_bytes)
        except (OutOfDeviceMemory, MemoryError):
            with self._lock:
                self._used_bytes -= size_bytes
            return None
        if size_bytes <= RECYCLED_BYTES or self.device.host_view(buffer, 0, 0) is None:
            self.device.fill(buffer, 0, size_bytes, 0)
        return buffer

    def free(self, buffer: Buffer) -> None:
        self.device.free(buffer)
        with self._lock:
            self._used_bytes -= buffer.size_bytes

    def run(self, handle: Handle, *, at_once: bool) -> Future[None]:
        """Run a program; the event fails with whatever goes wrong in it.

        `at_once`: in the caller's thread if the device is idle, which saves two changes of thread; otherwise the caller
        goes on while the device computes.

        Run and event enter the lane together, so that an error never surfaces in another client's call.
        """
        with self._lock:
            self.device.allow_blocking(at_once)
            self.device.run(handle)
            return self.device.record()
