"""The native CPU device: compiled programs over this machine's memory.

All variants of the kernels compute the same bits, so they share one `kernel_variant`; which of them runs is told by the
device's description.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from app.engine.device import DeviceCaps, Handle, Turn
from app.engine.devices.host import ALIGNMENT_BYTES, MAX_BUFFER_BYTES, HostBuffer, HostDevice, HostHandle
from app.engine.ggml import GGMLType
from app.engine.gguf.quants.codebook import GridName, grid
from app.engine.kernels import _cpu
from app.engine.program import Buffer, PlacedTensor, Program
from app.engine.rows import RowSelection
from app.errors import ConfigError, DeviceError, OutOfDeviceMemory, UnsupportedOp

#: Names the arithmetic. To be changed whenever a kernel's order of operations changes.
KERNEL_VARIANT = "cpu-exact-2"

#: A record of native code's table of tensors: type, op, flags, view; ne; nb; parameters; sources; address, room, uses.
_RECORD = struct.Struct("<iiIi4q4q16i10iQqq")
_N_PARAMS, _N_SOURCES = 16, 10

#: Which codebook a type needs, with its number in native code.
_BOOKS: dict[GGMLType, tuple[int, GridName]] = {
    GGMLType.IQ2_XXS: (0, "IQ2_XXS"),
    GGMLType.IQ2_XS: (1, "IQ2_XS"),
    GGMLType.IQ2_S: (2, "IQ2_S"),
    GGMLType.IQ3_XXS: (3, "IQ3_XXS"),
    GGMLType.IQ3_S: (4, "IQ3_S"),
    GGMLType.IQ1_S: (5, "IQ1_S"),
    GGMLType.IQ1_M: (5, "IQ1_S"),
}


def chosen_variant(wanted: str | None) -> str:
    """The kernels to run: those asked for, or the fastest. Raises ConfigError."""
    known = _cpu.variants()
    if wanted is None:
        return known[0]
    if wanted.lower() not in known:
        raise ConfigError(f"this machine has no {wanted!r} kernels; it runs {', '.join(known)}")
    return wanted.lower()


def physical_cores() -> int:
    """Cores this process may use; threads of one core count once where the system tells."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in usable:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read().strip())
        except OSError:  # not Linux, or hidden: every CPU is a core
            cores.add(str(cpu))
    return max(1, len(cores))


@contextmanager
def _on_cpus(cpus: Sequence[int]) -> Iterator[None]:
    """Threads started inside inherit these CPUs; this thread gets its own back. Raises ConfigError."""
    if not cpus:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system binds no threads to CPUs; leave out --cpu-range and --cpu-mask")
    mine = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - mine):
        usable = ", ".join(map(str, sorted(mine)))
        raise ConfigError(f"CPU {missing[0]} is not among those this process may use: {usable}")
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


@contextmanager
def memory_for(device_name: str, n_bytes: int) -> Iterator[None]:
    """What native code needs `n_bytes` for. Raises OutOfDeviceMemory where the system has not so much."""
    try:
        yield
    except MemoryError as error:
        raise OutOfDeviceMemory(device_name, n_bytes) from error


class CpuHandle(HostHandle):
    """A program of the native engine."""

    __slots__ = ("native",)

    def __init__(self, device: CpuDevice, program_name: str, native: _cpu.Program) -> None:
        super().__init__(device, program_name)
        self.native: _cpu.Program | None = native

    def let_go(self) -> None:
        self.native = None

    def work(self) -> None:
        assert self.native is not None
        with memory_for(self.device.name, self.native.scratch_bytes):
            failure = self.native.run()
        if failure:
            raise DeviceError(f"device {self.device.name} failed in {self.program_name}: {failure}")


class CpuTurn(Turn):
    """See `Turn`."""

    def __init__(self, handle: CpuHandle, native: _cpu.Turn) -> None:
        self._handle = handle
        self._native = native

    def run(self, items: memoryview, out: memoryview) -> bool:
        handle = self._handle

        def work() -> str | None:
            if handle.unusable is not None or handle.native is None:
                return handle.unusable
            with memory_for(handle.device.name, handle.native.scratch_bytes):
                return self._native.run(items, out)

        failure = handle.device.if_idle(work, None)
        if failure:
            raise DeviceError(f"device {handle.device.name} failed in {handle.program_name}: {failure}")
        return failure is not None


class CpuDevice(HostDevice):
    """See `HostDevice`. `n_threads` None: one per core of `cpus`, the CPUs its threads may run on (none named: all).

    `memory_limit_bytes` is also the most scratch that a program may need, which does not count as allocated.
    `pin`: each thread stays on a CPU of its own, the lane's on the first. `variant` names the instruction set to use
    instead of the best; it changes speed, not bits.
    """

    def __init__(
        self,
        name: str = "CPU",
        n_threads: int | None = None,
        memory_limit_bytes: int | None = None,
        pin: bool = False,
        variant: str | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        variant = chosen_variant(variant)
        with _on_cpus(cpus):
            threads = physical_cores() if n_threads is None else n_threads
            self._engine = _cpu.Engine(variant, threads, pin)  # refuses a bad number before a lane starts
        caps = DeviceCaps(
            kind="cpu",
            kernel_variant=KERNEL_VARIANT,
            alignment_bytes=ALIGNMENT_BYTES,
            max_buffer_bytes=MAX_BUFFER_BYTES,
            description=f"{variant} kernels, {threads} thread{'s' if threads > 1 else ''}",
        )
        super().__init__(name, caps, memory_limit_bytes)
        if (cpus or pin) and hasattr(os, "sched_setaffinity"):
            lanes = sorted(cpus or os.sched_getaffinity(0))
            self._lane.submit(lambda: os.sched_setaffinity(0, lanes[:1] if pin else lanes))

    def _bind(self, program: Program) -> CpuHandle:
        for tensor in program.tensors:
            if tensor.type in _BOOKS:
                number, book = _BOOKS[tensor.type]
                _cpu.load_codebook(number, grid(book).tobytes())
        table = b"".join(self._record(tensor) for tensor in program.tensors)
        try:
            with memory_for(self.name, len(table)):
                native = self._engine.compile(table, list(program.nodes))
        except _cpu.Unsupported as error:
            index, _, reason = str(error).partition(":")
            tensor = program.tensors[int(index)]
            raise UnsupportedOp(self.name, tensor.op.name, f"{tensor.name}: {reason.strip()}") from error
        if self._limit_bytes is not None and native.scratch_bytes > self._limit_bytes:
            raise OutOfDeviceMemory(self.name, native.scratch_bytes, self._limit_bytes)
        return CpuHandle(self, program.name, native)

    def prepare_turn(
        self, handle: Handle, inputs: Buffer, base: int, outputs: Buffer, offset: int, rows: RowSelection
    ) -> CpuTurn:
        mine = self._own_handle(handle)
        target, source = self._own(inputs), self._own(outputs)
        self._rows(source, offset, rows, None)
        if (
            not isinstance(mine, CpuHandle)
            or mine.native is None
            or mine not in target.handles
            or mine not in source.handles
        ):
            raise DeviceError(f"device {self.name}: {mine.program_name} was released, or does not use these buffers")
        native = self._engine.turn(
            mine.native, base, target.address, target.size_bytes, source.address + offset, rows.n_columns, rows.packed
        )
        return CpuTurn(mine, native)

    def _record(self, tensor: PlacedTensor) -> bytes:
        address = room = 0
        if isinstance(tensor.buffer, HostBuffer):
            address = tensor.buffer.address + tensor.offset
            room = tensor.buffer.size_bytes - tensor.offset
        params = (*tensor.params, *(0,) * (_N_PARAMS - len(tensor.params)))
        sources = (*tensor.src, *(-1,) * (_N_SOURCES - len(tensor.src)))
        return _RECORD.pack(
            tensor.type, tensor.op, tensor.flags, tensor.view_src, *tensor.ne, *tensor.nb, *params, *sources,
            address, room, tensor.use_count,
        )  # fmt: skip

    def _give_out(self, address: int, size_bytes: int, replaced: bool) -> None:
        with memory_for(self.name, size_bytes):
            self._engine.touch(address, address + size_bytes, replaced)

    def _forget(self, buffer: HostBuffer) -> None:
        self._engine.forget(buffer.address, buffer.address + buffer.size_bytes)
