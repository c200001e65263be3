"""A worker looks through rows of logits and sends the best tokens alone; wishes that make no sense end the session."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.rows import MAX_BEST, WHOLE, BestRow, RowSelection, RowWish
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.gated import Gated
from tests.rpc.programs import sum_program
from tests.rpc.raw import RawClient
from tests.rpc.workers import connected, remote, tcp_worker

READ_ROWS = 143
WAIT_S = 30.0
TABLE = np.random.default_rng(3).normal(0, 1, (2, 200)).astype(np.float32)
ROWS = RowSelection(200, (RowWish(5, True), RowWish(1, False)))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with tcp_worker(NumpyDevice()) as made:
        yield made


@pytest.fixture
def client(worker: Worker) -> Iterator[RawClient]:
    with RawClient(worker.port) as made:
        yield made


def wishes(address: int, n_columns: int, packed: bytes) -> bytes:
    return struct.pack("<QI", address, n_columns) + packed


def test_the_answer_is_a_record_for_each_row(client: RawClient) -> None:
    _, base = client.alloc(4096)
    client.tell(133, struct.pack("<QI", base + 64, TABLE.nbytes) + TABLE.tobytes())
    answer = client.ask(READ_ROWS, wishes(base + 64, 200, ROWS.packed))
    assert answer == bytes(ROWS.select(TABLE.data.cast("B")))
    assert client.ask(READ_ROWS, wishes(base, 200, b"")) == b""


@pytest.mark.parametrize(
    ("offset", "n_columns", "packed", "reason"),
    [
        (0, 200, b"abc", "3 bytes are not whole wishes"),
        (0, 0, bytes(4 * 65537), "262148 bytes of wishes"),
        (0, 200, struct.pack("<HH", 201, 0), "the 201 best of 200 columns are more than 200"),
        (0, 3000, struct.pack("<HH", MAX_BEST + 1, 0), f"the {MAX_BEST + 1} best of 3000 columns"),
        (0, 1025, WHOLE_ROW := struct.pack("<HH", 0, 0), "4100 bytes"),
        (4092, 2, WHOLE_ROW, "8 bytes at address"),
        (1, 2, WHOLE_ROW, "cannot begin at byte 1"),
        (0, (1 << 32) - 1, struct.pack("<HH", 1, 1) * 9, "bytes at address"),
    ],
)
def test_senseless_wishes_end_the_session_and_no_other(
    worker: Worker, client: RawClient, offset: int, n_columns: int, packed: bytes, reason: str
) -> None:
    _, base = client.alloc(4096)
    client.ask(135, bytes(8))
    client.tell(READ_ROWS, wishes(base + offset, n_columns, packed))
    notice = b""
    while part := client.sock.recv(4096):
        notice += part
    assert notice[:8] == b"\xff" * 8 and reason.encode() in notice
    with RawClient(worker.port) as other:
        assert other.alloc(64)[0]


class Clumsy(Gated):
    """Leaves rows to be looked through by others."""

    selects_rows = False


def test_rows_that_are_still_computed_are_looked_through_in_their_turn() -> None:
    """The session goes on meanwhile, and answers keep their order."""
    device = Gated()
    with tcp_worker(device) as made, connected(made) as (far,):
        assert far.selects_rows
        buffer = far.alloc(1 << 20)
        handle = far.prepare(sum_program(buffer))
        data = np.zeros(1 << 17, np.float32)
        data[:4], data[32:36] = (1, 2, 3, 4), (10, 40, 30, 20)
        far.write(buffer, 0, data.data.cast("B"))
        far.run(handle)
        rows = RowSelection(4, (RowWish(2, False),))
        best, event = far.read_rows(buffer, 256, rows), far.record()
        far.write(buffer, 0, bytes(1 << 19)).result(WAIT_S)
        assert not best.done() and not event.done()
        device.gate.set()
        (row,) = rows.rows(best.result(WAIT_S))
        assert isinstance(row, BestRow)
        assert (row.tokens.tolist(), row.values.tolist()) == ([1, 2], [42, 33])
        event.result(WAIT_S)


def test_a_device_that_cannot_look_through_rows_is_helped() -> None:
    device = Clumsy()
    with tcp_worker(device) as made, connected(made) as (far,):
        buffer = far.alloc(4096)
        far.write(buffer, 0, np.array([1, 2, 3, 4], np.float32).data.cast("B"))
        far.write(buffer, 128, np.array([10, 40, 30, 20], np.float32).data.cast("B"))
        far.run(far.prepare(sum_program(buffer)))
        best = far.read_rows(buffer, 256, RowSelection(4, (RowWish(1, False),)))
        device.gate.set()
        (row,) = RowSelection(4, (RowWish(1, False),)).rows(best.result(WAIT_S))
        assert (row.token(0), row.values.tolist()) == (1, [42])


def test_nothing_is_asked_of_a_worker_that_does_not_say_it_can() -> None:
    with remote(NumpyDevice(), WorkerSettings(extensions=False)) as far:
        assert not far.selects_rows


def test_a_long_selection_travels_whole() -> None:
    table = np.random.default_rng(4).normal(0, 1, (300, 2000)).astype(np.float32)
    rows = RowSelection(2000, (RowWish(400, True), WHOLE, RowWish(1, True)) * 100)
    with remote(NumpyDevice()) as far:
        buffer = far.alloc(table.nbytes)
        far.write(buffer, 0, table.data.cast("B"))
        assert bytes(far.read_rows(buffer, 0, rows).result(WAIT_S)) == bytes(rows.select(table.data.cast("B")))


def test_rows_of_nothing_but_equals_take_no_memory_to_speak_of() -> None:
    """A blank buffer costs a client nothing, and all of its values are among the best."""
    n_columns = 48 << 20
    with tcp_worker(NumpyDevice()) as worker, RawClient(worker.port) as client:
        _, base = client.alloc(4 * n_columns)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = client.ask(READ_ROWS, wishes(base, n_columns, RowSelection(n_columns, (RowWish(2, False),)).packed))
        assert struct.unpack("<Q2I", answer[:16]) == (0, 0, 1)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # the row itself at most
