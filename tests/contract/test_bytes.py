"""Bytes go where they are sent and come back unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from app.engine.device import Device, Payload
from app.engine.rows import WHOLE, RowSelection, RowWish
from app.errors import DeviceError
from tests.contract.driving import SIZE, TIMEOUT_S, fails, floats, get, put


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


@pytest.mark.parametrize("n_bytes", [1, 3000, 70_000])
def test_pieces_are_written_in_order_at_their_places(device: Device, n_bytes: int) -> None:
    buffer = device.alloc(SIZE + 3 * n_bytes)
    device.fill(buffer, 0, buffer.size_bytes, 7)
    device.write_pieces(buffer, 5, [])
    device.write_pieces(buffer, 5, [(n_bytes, memoryview(b"x" * n_bytes)), (0, memoryview(b"ab"))])
    wanted = bytearray(b"\7" * (6 + 2 * n_bytes))
    wanted[5 + n_bytes : 5 + 2 * n_bytes] = b"x" * n_bytes
    wanted[5:7] = b"ab"
    assert get(device, buffer, 0, len(wanted)) == bytes(wanted)
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


def test_rows_are_looked_through_where_they_lie(device: Device) -> None:
    table = np.random.default_rng(5).normal(0, 1, (3, 500)).astype(np.float32)
    rows = RowSelection(500, (RowWish(20, True), WHOLE, RowWish(1, False)))
    buffer = device.alloc(SIZE + table.nbytes)
    put(device, buffer, table.tobytes(), SIZE)
    if not device.selects_rows:
        fails(DeviceError, lambda: device.read_rows(buffer, SIZE, rows))
        device.free(buffer)
        return
    wanted = bytes(rows.select(table.data.cast("B")))
    assert bytes(device.read_rows(buffer, SIZE, rows).result(TIMEOUT_S)) == wanted
    mine = bytearray(rows.n_bytes)
    device.read_rows(buffer, SIZE, rows, memoryview(mine)).result(TIMEOUT_S)
    assert mine == wanted
    for wrong in (
        lambda: device.read_rows(buffer, SIZE + 4, rows),
        lambda: device.read_rows(buffer, SIZE - 2, rows),
        lambda: device.read_rows(buffer, SIZE, rows, memoryview(bytearray(7))),
        lambda: device.read_rows(buffer, SIZE, RowSelection(5, (RowWish(6, False),))),
    ):
        fails(DeviceError, wrong)
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
