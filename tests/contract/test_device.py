"""What every device promises: order, futures, errors, memory. No sleeps: gates are futures that the test resolves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from app.engine.device import Device, Handle, Payload
from app.engine.ggml import GGMLType, Op
from app.engine.program import Buffer, Program
from app.errors import DeviceError, DeviceLost, FormatError, OutOfDeviceMemory, UnsupportedOp
from tests.contract.cases import F32, CaseBuilder, Placed, place
from tests.contract.conftest import MakeDevice

TIMEOUT_S = 20
SIZE = 256


def get(device: Device, buffer: Buffer, offset: int = 0, size: int | None = None) -> bytes:
    return bytes(device.read(buffer, offset, buffer.size_bytes - offset if size is None else size).result(TIMEOUT_S))


def put(device: Device, buffer: Buffer, data: bytes, offset: int = 0) -> None:
    device.write(buffer, offset, data).result(TIMEOUT_S)


def gate(device: Device, buffer: Buffer, offset: int = 0, size: int = 1) -> Future[Payload]:
    """Block the device's lane until the returned future is given `size` bytes."""
    payload: Future[Payload] = Future()
    device.write(buffer, offset, payload, size_bytes=size)
    return payload


def fails(error: type[Exception], call: Callable[[], Any]) -> None:
    """The call fails, at once or by its future."""
    with pytest.raises(error):
        result = call()
        if isinstance(result, Future):
            result.result(TIMEOUT_S)


def doubling(device: Device, n: int = 8) -> tuple[Placed, Handle, int, int]:
    """A program that writes 2 * x: its place, its handle, and the offsets of x and of the result."""
    case = CaseBuilder("doubling")
    x = case.leaf(F32, np.arange(n))
    out = case.node(Op.SCALE, F32, (n,), (x,), (2.0, 0.0))
    placed = place(case, device)
    return placed, device.prepare(placed.program), placed.offsets[id(x)], placed.offsets[id(out)]


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


# Bytes in and out.


def test_caps_and_buffers(device: Device) -> None:
    alignment = device.caps.alignment_bytes
    assert alignment > 0 and alignment & (alignment - 1) == 0
    assert device.caps.max_buffer_bytes > 0
    assert device.caps.kind and device.caps.kernel_variant
    buffer = device.alloc(SIZE)
    assert buffer.size_bytes == SIZE
    assert buffer.device_name == device.name
    device.free(buffer)


def test_parts_of_a_buffer_hold_what_was_written_to_them(device: Device) -> None:
    buffer = device.alloc(SIZE)
    device.fill(buffer, 0, SIZE, 7)
    put(device, buffer, b"abcdef", 3)
    put(device, buffer, b"XY", 5)
    assert get(device, buffer, 0, 12) == b"\7\7\7abXYef\7\7\7"
    assert get(device, buffer, 8, 1) == b"f"
    device.free(buffer)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: memoryview(np.frombuffer(b, np.float32))])
def test_payloads_may_be_anything_that_exports_bytes(device: Device, kind: Callable[[bytes], Payload]) -> None:
    buffer = device.alloc(SIZE)
    data = floats(1, 2, 3)
    device.write(buffer, 16, kind(data)).result(TIMEOUT_S)
    assert get(device, buffer, 16, 12) == data
    device.free(buffer)


def test_empty_transfers_are_allowed_up_to_the_end(device: Device) -> None:
    buffer = device.alloc(SIZE)
    put(device, buffer, b"", SIZE)
    device.copy(buffer, 0, buffer, SIZE, 0)
    device.fill(buffer, SIZE, 0, 1)
    assert get(device, buffer, SIZE, 0) == b""
    device.free(buffer)


def test_an_empty_buffer_is_a_buffer(device: Device) -> None:
    buffer = device.alloc(0)
    assert get(device, buffer) == b""
    device.free(buffer)


def test_a_read_into_the_callers_memory_fills_it(device: Device) -> None:
    buffer = device.alloc(SIZE)
    put(device, buffer, b"hello")
    mine = bytearray(5)
    result = device.read(buffer, 0, 5, memoryview(mine)).result(TIMEOUT_S)
    assert mine == b"hello"
    assert bytes(result) == b"hello"
    device.free(buffer)


def test_a_read_into_memory_that_does_not_fit_is_refused(device: Device) -> None:
    buffer = device.alloc(SIZE)
    fails(DeviceError, lambda: device.read(buffer, 0, 5, memoryview(bytearray(4))))
    fails(DeviceError, lambda: device.read(buffer, 0, 5, memoryview(b"12345")))
    device.free(buffer)


def test_what_was_read_does_not_change_any_more(device: Device) -> None:
    buffer = device.alloc(SIZE)
    put(device, buffer, b"first")
    before = device.read(buffer, 0, 5).result(TIMEOUT_S)
    put(device, buffer, b"later")
    assert bytes(before) == b"first"
    device.free(buffer)


def test_host_memory_is_free_again_once_the_write_is_done(device: Device) -> None:
    buffer = device.alloc(SIZE)
    mine = bytearray(b"mine")
    device.write(buffer, 0, mine).result(TIMEOUT_S)
    mine[:] = b"else"
    assert get(device, buffer, 0, 4) == b"mine"
    device.free(buffer)


def test_copy_and_fill(device: Device) -> None:
    a, b = device.alloc(SIZE), device.alloc(SIZE)
    device.fill(a, 0, SIZE, 0)
    device.fill(b, 0, SIZE, 0xFF)
    put(device, a, b"0123456789")
    device.copy(a, 2, b, 100, 4)
    device.copy(a, 0, a, 10, 10)
    device.fill(a, 3, 2, ord("x"))
    assert get(device, b, 99, 6) == b"\xff2345\xff"
    assert get(device, a, 0, 20) == b"012xx567890123456789"
    device.free(a)
    device.free(b)


def test_a_large_transfer_arrives_whole(device: Device) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5_000_011, dtype=np.uint8).tobytes()
    buffer = device.alloc(len(data))
    put(device, buffer, data)
    assert get(device, buffer) == data
    device.free(buffer)


# Order.


def test_calls_take_effect_in_call_order(device: Device) -> None:
    placed, handle, x, out = doubling(device, 2)
    reads = []
    for value in range(20):
        device.write(placed.buffer, x, floats(value, -value))
        device.run(handle)
        reads.append(device.read(placed.buffer, out, 8))
    for value, read in enumerate(reads):
        assert bytes(read.result(TIMEOUT_S)) == floats(2 * value, -2 * value)
    device.release(handle)
    device.free(placed.buffer)


def test_programs_alternate_and_see_each_others_results(device: Device) -> None:
    """The result of one program is the input of another; both are prepared once."""
    placed, double, x, out = doubling(device, 2)
    case = CaseBuilder("back")
    source = case.leaf(F32, np.zeros(2))
    case.node(Op.SCALE, F32, (2,), (source,), (1.0, 1.0))
    other = place(case, device)
    add_one = device.prepare(other.program)
    y, result = other.offsets[id(source)], other.offsets[id(case.nodes[0])]
    device.write(placed.buffer, x, floats(1, 2))
    for _ in range(5):  # x -> 2 x + 1
        device.run(double)
        device.copy(placed.buffer, out, other.buffer, y, 8)
        device.run(add_one)
        device.copy(other.buffer, result, placed.buffer, x, 8)
    assert get(device, placed.buffer, x, 8) == floats(63, 95)
    for handle in (double, add_one):
        device.release(handle)
    for buffer in (placed.buffer, other.buffer):
        device.free(buffer)


def test_nothing_behind_an_awaited_payload_happens_before_it(device: Device) -> None:
    placed, handle, x, out = doubling(device, 2)
    payload: Future[Payload] = Future()
    written = device.write(placed.buffer, x, payload, size_bytes=8)
    device.run(handle)
    read = device.read(placed.buffer, out, 8)
    event = device.record()
    assert not written.done() and not read.done() and not event.done()
    payload.set_result(floats(3, 4))
    assert bytes(read.result(TIMEOUT_S)) == floats(6, 8)
    assert event.result(TIMEOUT_S) is None
    assert written.done()
    device.release(handle)
    device.free(placed.buffer)


def test_an_event_before_an_awaited_payload_does_not_wait_for_it(device: Device) -> None:
    buffer = device.alloc(SIZE)
    before = device.record()
    payload = gate(device, buffer)
    after = device.record()
    before.result(TIMEOUT_S)
    assert not after.done()
    payload.set_result(b"!")
    after.result(TIMEOUT_S)
    device.free(buffer)


def test_frees_and_releases_wait_their_turn(device: Device) -> None:
    placed, handle, x, out = doubling(device, 1)
    payload = gate(device, placed.buffer, x, 4)
    device.run(handle)
    read = device.read(placed.buffer, out, 4)
    device.release(handle)
    device.free(placed.buffer)
    payload.set_result(floats(5))
    assert bytes(read.result(TIMEOUT_S)) == floats(10)
    device.synchronize()


def test_submitting_does_not_wait(device: Device) -> None:
    """A lane that is blocked still takes any number of calls."""
    placed, handle, x, out = doubling(device, 1)
    payload = gate(device, placed.buffer, x, 4)
    reads = []
    for _ in range(50):
        device.run(handle)
        device.copy(placed.buffer, out, placed.buffer, x, 4)
        reads.append(device.read(placed.buffer, out, 4))
    assert not any(read.done() for read in reads)
    payload.set_result(floats(1))
    assert [bytes(read.result(TIMEOUT_S)) for read in reads] == [floats(2.0**i) for i in range(1, 51)]
    device.release(handle)
    device.free(placed.buffer)


def test_what_one_device_reads_another_writes_without_the_caller(device: Device, make_device: MakeDevice) -> None:
    other = make_device()
    placed, handle, x, out = doubling(device, 2)
    target, there, y, result = doubling(other, 2)
    payload = gate(device, placed.buffer, x, 8)
    device.run(handle)
    passed: Future[Any] = device.read(placed.buffer, out, 8)
    other.write(target.buffer, y, passed, size_bytes=8)
    other.run(there)
    answer = other.read(target.buffer, result, 8)
    assert not answer.done()
    payload.set_result(floats(1, -3))
    assert bytes(answer.result(TIMEOUT_S)) == floats(4, -12)
    device.release(handle)
    device.free(placed.buffer)


def test_a_callback_may_submit_more_work(device: Device) -> None:
    buffer = device.alloc(SIZE)
    put(device, buffer, b"ping")
    done: Future[bytes] = Future()

    def again(read: Future[memoryview]) -> None:
        device.write(buffer, 0, bytes(read.result()).replace(b"i", b"o"))
        device.read(buffer, 0, 4).add_done_callback(lambda last: done.set_result(bytes(last.result())))

    device.read(buffer, 0, 4).add_done_callback(again)
    assert done.result(TIMEOUT_S) == b"pong"
    device.free(buffer)


def test_many_threads_may_submit(device: Device) -> None:
    buffer = device.alloc(8 * 100)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(100):
                put(device, buffer, bytes([number]), 8 * i + number)
        except BaseException as error:  # reported by the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert get(device, buffer) == bytes(range(8)) * 100
    device.free(buffer)


def test_a_thousand_events_come_and_go(device: Device) -> None:
    for _ in range(10):
        events = [device.record() for _ in range(100)]
        del events[::2]  # dropped without being waited for
        for event in events:
            event.result(TIMEOUT_S)


# Errors.


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


# Memory and the end.


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
