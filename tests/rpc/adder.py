"""A device for tests of the wire: plain bytes, a real lane, and ADD on contiguous F32 as its only op.

`before_run` is called in the lane before a program runs; tests use it to make computing slow or to count runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from app.engine.device import Device, DeviceCaps, DeviceMemory, Handle, Payload, WeightHint
from app.engine.ggml import GGMLType, Op
from app.engine.lane import Lane
from app.engine.program import Buffer, PlacedTensor, Program
from app.errors import DeviceError, OutOfDeviceMemory, UnsupportedOp


class BytesBuffer(Buffer):
    def __init__(self, device_name: str, size_bytes: int) -> None:
        super().__init__(device_name, size_bytes)
        self.bytes = np.zeros(size_bytes, np.uint8)


class AdderHandle(Handle):
    def __init__(self, program: Program) -> None:
        super().__init__(program.name)
        self.program = program


class Adder(Device):
    def __init__(self, name: str = "adder", total_bytes: int = 1 << 30) -> None:
        self.name = name
        self.caps = DeviceCaps("adder", "adder-1", 32, 1 << 40, "adds numbers")
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.before_run: Callable[[], None] = lambda: None
        self._lane = Lane(name)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.total_bytes - self.used_bytes, self.total_bytes)

    def alloc(self, size_bytes: int) -> Buffer:
        if self.used_bytes + size_bytes > self.total_bytes:
            raise OutOfDeviceMemory(self.name, size_bytes, self.total_bytes - self.used_bytes)
        self.used_bytes += size_bytes
        return BytesBuffer(self.name, size_bytes)

    def free(self, buffer: Buffer) -> None:
        self.used_bytes -= buffer.size_bytes
        self._lane.submit(lambda: None)

    def write(
        self,
        buffer: Buffer,
        offset: int,
        payload: Payload | Future[Payload],
        *,
        size_bytes: int | None = None,
        hint: WeightHint | None = None,
    ) -> Future[None]:
        def work() -> None:
            value = payload.result() if isinstance(payload, Future) else payload
            data = np.frombuffer(value, np.uint8)
            _bytes(buffer)[offset : offset + len(data)] = data

        return self._lane.call(work)

    def read(self, buffer: Buffer, offset: int, size_bytes: int, into: memoryview | None = None) -> Future[memoryview]:
        def work() -> memoryview:
            data = _bytes(buffer)[offset : offset + size_bytes]
            if into is None:
                return data.copy().data
            into[:] = data.data
            return into

        return self._lane.call(work, surfaces=True)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, size_bytes: int) -> None:
        def work() -> None:
            data = _bytes(source)[source_offset : source_offset + size_bytes]
            _bytes(target)[target_offset : target_offset + size_bytes] = data

        self._lane.submit(work)

    def fill(self, buffer: Buffer, offset: int, size_bytes: int, value: int) -> None:
        def work() -> None:
            _bytes(buffer)[offset : offset + size_bytes] = value

        self._lane.submit(work)

    def prepare(self, program: Program) -> Handle:
        for node in program.nodes:
            tensor = program.tensors[node]
            if tensor.is_computed and (tensor.op != Op.ADD or tensor.type != GGMLType.F32):
                raise UnsupportedOp(self.name, tensor.op.name, "this device only adds")
        return AdderHandle(program)

    def run(self, handle: Handle) -> None:
        assert isinstance(handle, AdderHandle)
        program = handle.program

        def work() -> None:
            self.before_run()
            for node in program.nodes:
                tensor = program.tensors[node]
                if tensor.is_computed:
                    a, b = (_values(program.tensors[i]) for i in tensor.src)
                    _values(tensor)[:] = a + b

        self._lane.submit(work)

    def release(self, handle: Handle) -> None:
        self._lane.submit(lambda: None)

    def record(self) -> Future[None]:
        return self._lane.call(lambda: None, surfaces=True)

    def host_view(self, buffer: Buffer, offset: int, size_bytes: int) -> memoryview:
        view: memoryview = self._lane.call(lambda: _bytes(buffer)[offset : offset + size_bytes].data).result()
        return view

    def allow_blocking(self, allowed: bool = True) -> None:
        self._lane.allow_blocking(allowed)

    def close(self) -> None:
        self._lane.close()


def _bytes(buffer: Buffer) -> np.ndarray:
    assert isinstance(buffer, BytesBuffer)
    return buffer.bytes


def _values(tensor: PlacedTensor) -> np.ndarray:
    if tensor.buffer is None:
        raise DeviceError("no memory")
    return _bytes(tensor.buffer)[tensor.offset : tensor.offset + tensor.n_bytes].view(np.float32)
