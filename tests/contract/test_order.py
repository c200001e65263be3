"""One ordered lane: calls take effect in call order, and nothing waits for the caller."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from app.engine.device import Device, Payload
from app.engine.ggml import Op
from tests.contract.cases import F32, CaseBuilder, place
from tests.contract.conftest import MakeDevice
from tests.contract.driving import SIZE, TIMEOUT_S, doubling, floats, gate, get, put


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
