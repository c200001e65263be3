"""What is wrong is refused, or fails its own future and the next read; the device works on."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from app.engine.device import Device, Payload
from app.engine.ggml import GGMLType, Op
from app.engine.program import Program
from app.errors import DeviceError, DeviceLost, FormatError, UnsupportedOp
from tests.contract.cases import CaseBuilder, place
from tests.contract.conftest import MakeDevice
from tests.contract.driving import SIZE, TIMEOUT_S, doubling, fails, gate, get, put


def test_a_payload_that_fails_fails_its_write_and_the_next_read(device: Device) -> None:
    buffer = device.alloc(SIZE)
    payload: Future[Payload] = Future()
    written = device.write(buffer, 0, payload, size_bytes=4)
    read = device.read(buffer, 0, 4)
    payload.set_exception(DeviceLost("10.0.0.7:50052", "connection reset"))
    with pytest.raises(DeviceLost, match=r"10\.0\.0\.7"):
        written.result(TIMEOUT_S)
    with pytest.raises(DeviceLost, match=r"10\.0\.0\.7"):
        read.result(TIMEOUT_S)
    put(device, buffer, b"fine")  # the device itself is not lost, and the error has been told
    assert get(device, buffer, 0, 4) == b"fine"
    device.synchronize()
    device.free(buffer)


def test_an_error_surfaces_at_the_next_event(device: Device) -> None:
    buffer = device.alloc(SIZE)
    gate(device, buffer).set_exception(ValueError("no bytes came"))
    with pytest.raises(ValueError, match="no bytes came"):
        device.synchronize()
    device.synchronize()
    device.free(buffer)


def test_a_payload_of_another_size_is_refused(device: Device) -> None:
    buffer = device.alloc(SIZE)
    device.fill(buffer, 0, SIZE, 1)
    for size in (3, 5):
        payload: Future[Payload] = Future()
        written = device.write(buffer, 0, payload, size_bytes=4)
        payload.set_result(b"x" * size)
        with pytest.raises(DeviceError):
            written.result(TIMEOUT_S)
        fails(DeviceError, device.synchronize)
    assert get(device, buffer) == b"\1" * SIZE
    fails(DeviceError, lambda: device.write(buffer, 0, b"123", size_bytes=4))
    fails(DeviceError, lambda: device.write(buffer, 0, Future()))
    device.free(buffer)


OUTSIDE = [(-1, 4), (SIZE, 1), (SIZE - 3, 4), (0, SIZE + 1), (2**64 - 8, 16), (2**63, 1), (4, -1)]


@pytest.mark.parametrize(("offset", "size"), OUTSIDE)
def test_accesses_outside_a_buffer_are_refused(device: Device, offset: int, size: int) -> None:
    buffer, other = device.alloc(SIZE), device.alloc(4 * SIZE)
    device.fill(buffer, 0, SIZE, 9)
    if size >= 0:
        fails(DeviceError, lambda: device.write(buffer, offset, bytes(size)))
        fails(DeviceError, lambda: device.write_pieces(buffer, offset, [(0, memoryview(bytes(size)))]))
    fails(DeviceError, lambda: device.write(buffer, offset, Future(), size_bytes=size))
    fails(DeviceError, lambda: device.read(buffer, offset, size))
    fails(DeviceError, lambda: device.copy(buffer, offset, other, 0, size))
    fails(DeviceError, lambda: device.copy(other, 0, buffer, offset, size))
    fails(DeviceError, lambda: device.fill(buffer, offset, size, 0))
    assert get(device, buffer) == b"\x09" * SIZE
    device.free(buffer)
    device.free(other)


def test_overlapping_copies_and_wrong_fill_values_are_refused(device: Device) -> None:
    buffer = device.alloc(SIZE)
    fails(DeviceError, lambda: device.copy(buffer, 0, buffer, 3, 4))
    fails(DeviceError, lambda: device.copy(buffer, 3, buffer, 0, 4))
    for value in (-1, 256):
        fails(DeviceError, lambda value=value: device.fill(buffer, 0, 1, value))
    device.copy(buffer, 0, buffer, 4, 4)
    device.synchronize()
    device.free(buffer)


def test_a_freed_buffer_is_refused_everywhere(device: Device) -> None:
    placed, handle, _, _ = doubling(device)
    buffer = placed.buffer
    device.free(buffer)
    fails(DeviceError, lambda: device.write(buffer, 0, b"x"))
    fails(DeviceError, lambda: device.read(buffer, 0, 1))
    fails(DeviceError, lambda: device.fill(buffer, 0, 1, 0))
    fails(DeviceError, lambda: device.copy(buffer, 0, buffer, 8, 4))
    fails(DeviceError, lambda: device.prepare(placed.program))
    fails(DeviceError, lambda: device.free(buffer))
    device.release(handle)
    device.synchronize()


def test_a_program_whose_buffer_was_freed_does_not_run(device: Device) -> None:
    placed, handle, _, _ = doubling(device)
    device.free(placed.buffer)
    again = device.alloc(placed.buffer.size_bytes)  # may well be the same memory
    device.fill(again, 0, again.size_bytes, 3)

    def run() -> None:
        device.run(handle)
        device.synchronize()

    fails(DeviceError, run)
    assert get(device, again) == b"\3" * again.size_bytes
    device.free(again)


def test_a_released_program_does_not_run(device: Device) -> None:
    placed, handle, _, _ = doubling(device)
    device.release(handle)

    def run() -> None:
        device.run(handle)
        device.synchronize()

    fails(DeviceError, run)
    device.free(placed.buffer)


def test_buffers_and_programs_of_another_device_are_refused(device: Device, make_device: MakeDevice) -> None:
    other = make_device()
    placed, handle, _, _ = doubling(other)
    mine = device.alloc(SIZE)
    theirs = placed.buffer
    fails(DeviceError, lambda: device.write(theirs, 0, b"x"))
    fails(DeviceError, lambda: device.read(theirs, 0, 1))
    fails(DeviceError, lambda: device.copy(mine, 0, theirs, 0, 1))
    fails(DeviceError, lambda: device.copy(theirs, 0, mine, 0, 1))
    fails(DeviceError, lambda: device.fill(theirs, 0, 1, 0))
    fails(DeviceError, lambda: device.free(theirs))
    fails(DeviceError, lambda: device.prepare(placed.program))
    fails(DeviceError, lambda: device.run(handle))
    device.synchronize()
    assert get(other, theirs) == placed.image.tobytes()
    device.free(mine)


def test_programs_that_cannot_run_are_refused_when_prepared(device: Device) -> None:
    """The device stays usable."""
    case = CaseBuilder("refused")
    x = case.leaf(GGMLType.I32, np.arange(4))
    case.node(Op.RMS_NORM, GGMLType.I32, (4,), (x,), (1e-5,))
    placed = place(case, device)
    fails(UnsupportedOp, lambda: device.prepare(placed.program))
    tensors = list(placed.program.tensors)
    case_outside = Program("outside", tuple(tensors), (len(tensors) + 7,))
    fails((FormatError, DeviceError), lambda: device.prepare(case_outside))  # type: ignore[arg-type]
    assert get(device, placed.buffer) == placed.image.tobytes()
    device.free(placed.buffer)
