"""The Device contract: one ordered lane of work on one piece of hardware, here or far away.

- Calls take effect in call order and do not block: accepted is not done. Only `alloc`, `free`, `prepare` and `close`
  may block; they happen at start, at reservation, and at the end.
- `write` may carry a future as its payload; it waits in its place in the lane until the payload is there, and
  everything behind it waits too. Host memory handed to `write` stays untouched until the returned future resolves.
- `read` and `record` return futures. They resolve when everything before them in the lane has truly finished on the
  device. An answered read proves the same, so the hot path needs no events of its own.
- An error in submitted work fails that call's own future if it has one, and is raised by the next `read`, `record` or
  `synchronize`. After the device is lost every call raises `DeviceLost`, and so do all futures in flight.
- Buffers belong to the device that made them. `copy` is within a device; regions must not overlap. From one device to
  another lead `read` and `write`, or a route; see `route`.
- What changes per token is data, never op parameters or offsets: a program is prepared once and run many times.

Futures are `concurrent.futures.Future`: they can be waited for from any thread, carry callbacks, and are what another
device's `write` takes as payload. Callbacks run on the lane's thread and must return at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from app.engine.connection import ConnectionStats
from app.engine.ggml import GGMLType, Shape
from app.engine.mask import MASK_BYTES, MaskRecipe
from app.engine.program import Buffer, PlacedTensor, Program
from app.engine.route import Route
from app.engine.rows import RowSelection
from app.errors import DeviceError, DeviceLost

#: Bytes on their way to or from a device. Anything that exports a contiguous buffer will do.
Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class DeviceCaps:
    """What a device is and can do.

    `kernel_variant` names the arithmetic: two devices that report the same variant give the same bytes for the same
    program. `alignment_bytes` holds for every tensor that owns memory.
    """

    kind: str
    kernel_variant: str
    alignment_bytes: int
    max_buffer_bytes: int
    description: str = ""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Free and total bytes as the device reports them; zeros mean it does not know."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class WeightHint:
    """Tells a device that the bytes of a write are (part of) a weight.

    A local device may repack it; a remote one may offer `content_hash()` (FNV-1a 64 over exactly the payload) to the
    worker first, so that bytes it already has do not travel. `ne` and `type` are those of the whole tensor.
    """

    name: str
    type: GGMLType
    ne: Shape
    content_hash: Callable[[], int] | None = field(default=None, compare=False)


def check_target(device_name: str, into: memoryview | None, size_bytes: int) -> None:
    """Raises DeviceError for a caller's memory that so many bytes cannot be read into."""
    if into is not None and (into.readonly or not into.contiguous or into.nbytes != size_bytes):
        raise DeviceError(f"device {device_name}: {size_bytes} bytes do not go into a memory of {into.nbytes}")


def check_mask_place(device_name: str, offset: int) -> None:
    """Raises DeviceError where no half floats can begin."""
    if offset % MASK_BYTES:
        raise DeviceError(f"device {device_name}: a mask cannot begin at byte {offset}")


class Handle:
    """A prepared program. Made by `Device.prepare`, valid until `Device.release` or until a buffer it uses is freed."""

    __slots__ = ("__weakref__", "program_name")

    def __init__(self, program_name: str) -> None:
        self.program_name = program_name


class Turn(ABC):
    """Small writes, a run and a read as one call, for those who wait anyway. Made by `Device.prepare_turn`."""

    @abstractmethod
    def run(self, items: memoryview, out: memoryview) -> bool:
        """Write what `items` hold (a sequence of `address u64 | size u32 | data`), run, read into `out`; blocks.

        False, and nothing was done: an address lies outside, the device has other things to do, or something before
        has failed. Raises DeviceError for what went wrong in it, which the device then forgets.
        """


class Device(ABC):
    """One ordered lane of work. See the module's docstring for what every method promises."""

    name: str
    caps: DeviceCaps
    #: Whether it answers `read_rows`.
    selects_rows: bool = False
    #: Whether it makes masks where they lie, of the recipe alone.
    builds_masks: bool = False

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Free and total bytes now. May block for one round trip."""

    @abstractmethod
    def alloc(self, size_bytes: int) -> Buffer:
        """Reserve memory; its contents are undefined. Blocks. Raises OutOfDeviceMemory."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give memory back, in lane order. Programs that use it must not run again."""

    @abstractmethod
    def write(
        self,
        buffer: Buffer,
        offset: int,
        payload: Payload | Future[Payload],
        *,
        size_bytes: int | None = None,
        hint: WeightHint | None = None,
    ) -> Future[None]:
        """Put bytes at `offset`. With a future as payload, `size_bytes` is the size it will have and must be given."""

    def write_pieces(self, buffer: Buffer, offset: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Write views of bytes, each so far behind `offset`. Their memory is never changed again."""
        for at, payload in pieces:
            self.write(buffer, offset + at, payload)

    def write_mask(self, buffer: Buffer, offset: int, recipe: MaskRecipe) -> Future[None]:
        """Put the mask of a recipe at `offset`, a multiple of 2, as `write` does with its bytes."""
        check_mask_place(self.name, offset)
        return self.write(buffer, offset, recipe.array.data.cast("B"))

    @abstractmethod
    def read(self, buffer: Buffer, offset: int, size_bytes: int, into: memoryview | None = None) -> Future[memoryview]:
        """Fetch bytes; into the caller's memory if given. The future's result is that memory or memory of its own."""

    def read_rows(
        self, buffer: Buffer, offset: int, rows: RowSelection, into: memoryview | None = None
    ) -> Future[memoryview]:
        """Look through rows of float32 from `offset` on, a multiple of 4, and fetch what is wanted of them.

        As `read` otherwise. Only where `selects_rows`; elsewhere read them whole and select at home.
        """
        raise DeviceError(f"device {self.name} hands out rows whole only")

    @abstractmethod
    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, size_bytes: int) -> None:
        """Copy within this device. The two regions must not overlap."""

    @abstractmethod
    def fill(self, buffer: Buffer, offset: int, size_bytes: int, value: int) -> None:
        """Set every byte of a region to `value` (0 to 255)."""

    @abstractmethod
    def prepare(self, program: Program) -> Handle:
        """Check a program and make it ready to run. Blocks. Raises UnsupportedOp."""

    @abstractmethod
    def run(self, handle: Handle) -> None:
        """Run a prepared program once, in lane order."""

    def prepare_turn(
        self, handle: Handle, inputs: Buffer, base: int, outputs: Buffer, offset: int, rows: RowSelection
    ) -> Turn | None:
        """Make a run, with writes into `inputs` before it and what `rows` want of `outputs` behind it, one call.

        The program must use both buffers. `base` is what the items of writes call the first byte of `inputs`. None
        where nothing is gained by it.
        """
        del handle, inputs, base, outputs, offset, rows
        return None

    @abstractmethod
    def release(self, handle: Handle) -> None:
        """Forget a prepared program, in lane order."""

    @abstractmethod
    def record(self) -> Future[None]:
        """An event: resolves when everything before it has finished on the device."""

    def synchronize(self) -> None:
        """Wait for everything submitted so far; raises what went wrong in it."""
        self.record().result()

    def alloc_bytes(self, tensor: PlacedTensor, sources: tuple[PlacedTensor, ...]) -> int:
        """Bytes to reserve for a tensor: its own size, more where the device wants scratch behind it. May block."""
        del sources
        return tensor.n_bytes

    def watch(self, on_lost: Callable[[DeviceLost], None]) -> None:
        """Have `on_lost` called once, from any thread, when the device is lost; at once if it is already.

        A device that cannot be lost never calls it.
        """
        del on_lost

    @property
    def connection(self) -> ConnectionStats | None:
        """What the connection to a remote device did so far, also when it is lost; None for a local device."""
        return None

    def open_route(self, target: Device) -> Route | None:
        """A route on which this device pushes to another, tried out; None where there is none, which is logged. Blocks.

        Opening it again closes the one there was.
        """
        del target
        return None

    def allow_blocking(self, allowed: bool = True) -> None:
        """Tell the device whether callers wait anyway: calls may block until their work is done, if that is faster."""
        del allowed

    def host_view(self, buffer: Buffer, offset: int, size_bytes: int) -> memoryview | None:
        """The bytes of a region where they lie, to read and to write; None where memory is not this process's own.

        Blocks until everything submitted before has finished. The view is good until the next call on this device that
        touches the region; a device that keeps bytes in another form puts them back first.
        """
        del buffer, offset, size_bytes
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish or fail what is submitted, free everything. Blocks; may be called twice."""
