"""Memory is counted, comes back, and ends with the device."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from app.engine.device import Device, Payload
from app.errors import DeviceError, DeviceLost, OutOfDeviceMemory
from tests.contract.conftest import MakeDevice
from tests.contract.driving import SIZE, TIMEOUT_S, doubling, fails, put


def test_memory_is_counted_and_comes_back(make_device: MakeDevice) -> None:
    limit = 1 << 20
    device = make_device(limit)
    before = device.memory()
    assert before.total_bytes == limit
    assert before.free_bytes == limit
    buffers = [device.alloc(limit // 4) for _ in range(3)]
    assert device.memory().free_bytes == limit - 3 * (limit // 4)
    for buffer in buffers:
        device.free(buffer)
    device.synchronize()
    assert device.memory().free_bytes == limit


def test_an_allocation_that_does_not_fit_is_refused(make_device: MakeDevice) -> None:
    limit = 1 << 20
    device = make_device(limit)
    half = device.alloc(limit // 2)
    with pytest.raises(OutOfDeviceMemory) as caught:
        device.alloc(limit // 2 + 1)
    assert caught.value.needed_bytes == limit // 2 + 1
    assert device.name in str(caught.value)
    put(device, half, b"still works")
    rest = device.alloc(limit // 2)
    device.free(half)
    device.free(rest)
    device.alloc(limit)  # frees that are on their way count


def test_an_absurd_allocation_is_refused(device: Device) -> None:
    fails(DeviceError, lambda: device.alloc(1 << 60))
    fails(DeviceError, lambda: device.alloc(-1))


def test_memory_without_a_limit_is_the_machines(device: Device) -> None:
    memory = device.memory()
    assert 0 <= memory.free_bytes <= memory.total_bytes
    assert memory.total_bytes > 1 << 28


def test_closing_finishes_what_was_submitted(make_device: MakeDevice) -> None:
    device = make_device()
    buffer = device.alloc(SIZE)
    device.fill(buffer, 0, SIZE, 0)
    device.write(buffer, 0, b"last")
    read = device.read(buffer, 0, 4)
    event = device.record()
    device.close()
    device.close()
    for future in (read, event):
        try:
            future.result(TIMEOUT_S)
        except DeviceError:
            continue  # failing what is left is allowed, leaving it open is not


def test_closing_does_not_wait_for_a_payload_that_never_comes(make_device: MakeDevice) -> None:
    device = make_device()
    buffer = device.alloc(SIZE)
    never: Future[Payload] = Future()
    written = device.write(buffer, 0, never, size_bytes=4)
    read = device.read(buffer, 0, 4)
    device.close()
    with pytest.raises(DeviceError):
        written.result(TIMEOUT_S)
    with pytest.raises(DeviceError):
        read.result(TIMEOUT_S)


def test_a_closed_device_refuses_every_call(make_device: MakeDevice) -> None:
    device = make_device()
    placed, handle, _, _ = doubling(device)
    buffer = placed.buffer
    device.close()
    fails(DeviceLost, lambda: device.alloc(4))
    fails(DeviceLost, device.memory)
    fails(DeviceLost, lambda: device.write(buffer, 0, b"x"))
    fails(DeviceLost, lambda: device.read(buffer, 0, 1))
    fails(DeviceLost, lambda: device.copy(buffer, 0, buffer, 8, 4))
    fails(DeviceLost, lambda: device.fill(buffer, 0, 1, 0))
    fails(DeviceLost, lambda: device.prepare(placed.program))
    fails(DeviceLost, lambda: device.run(handle))
    fails(DeviceLost, device.record)
    fails(DeviceLost, device.synchronize)


def test_a_host_view_is_the_memory_itself_once_all_work_is_done(make_device: MakeDevice) -> None:
    device = make_device()
    buffer = device.alloc(SIZE)
    device.write(buffer, 0, bytes(range(16)))
    view = device.host_view(buffer, 4, 8)
    if view is None:  # its memory is elsewhere
        return
    assert bytes(view) == bytes(range(4, 12))
    view[:2] = b"hi"
    assert bytes(device.read(buffer, 3, 4).result(TIMEOUT_S)) == b"\x03hi\x06"


def test_a_device_whose_callers_may_block_keeps_its_order(make_device: MakeDevice) -> None:
    device = make_device()
    device.allow_blocking()
    buffer = device.alloc(SIZE)
    for value in range(20):
        device.fill(buffer, 0, 8, value)
        device.write(buffer, 4, bytes([value + 1]) * 4)
        assert bytes(device.read(buffer, 0, 8).result(TIMEOUT_S)) == bytes([value] * 4 + [value + 1] * 4)
