"""What public bug reports say goes wrong on this wire, said to our worker: it refuses, and lives on unharmed."""

from __future__ import annotations

import logging
import resource
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import Op
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.raw import COMPUTE, I32, I64, RawClient, Sum, frame, graph, tensor
from tests.rpc.workers import tcp_worker, wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    devices = [NumpyDevice(f"CPU{i}", memory_limit_bytes=256 * MIB) for i in range(2)]
    with tcp_worker(*devices, settings=WorkerSettings(idle_s=30.0)) as served:
        yield served


@pytest.fixture
def client(worker: Worker) -> Iterator[RawClient]:
    with RawClient(worker.port) as connected:
        yield connected


@pytest.fixture(autouse=True)
def lives_on(worker: Worker) -> Iterator[None]:
    """Every case ends with a worker that serves the next client."""
    yield
    with RawClient(worker.port) as fresh:
        assert Sum(fresh, (1, 2, 3, 4), (10, 20, 30, 40)).result() == (11, 22, 33, 44)


# -- A03, A05: greetings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        frame(14),
        frame(14, b"x"),
        frame(15),
        frame(14, bytes(24)) * 2,
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes.fromhex("16030100050100000100"),
        b"\xff" * 4096,
        b"\x00",
    ],
    ids=["old-hello", "short-hello", "no-hello", "two-hellos", "http", "tls", "noise", "alloc-first"],
)
def test_a_wrong_greeting_is_hung_up_on(worker: Worker, first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "app.rpc"), RawClient(worker.port, hello=False) as stranger:
        stranger.send(first)
        if first.startswith(frame(14, bytes(24))):
            stranger.answer()
        assert stranger.is_closed()
    assert len([record for record in caplog.records if "closed client" in record.getMessage()]) == 1


def test_unknown_capabilities_are_ignored(worker: Worker) -> None:
    with RawClient(worker.port, hello=False) as client:
        answer = client.ask(14, b"\xff" * 24)
    assert answer == bytes([7, 0, 0, 0x54]) + bytes(24)


def test_a_silent_stranger_is_dropped() -> None:
    settings = WorkerSettings(hello_s=0.5)
    with tcp_worker(NumpyDevice(), settings=settings) as worker, RawClient(worker.port, hello=False) as stranger:
        assert stranger.is_closed()


# -- A06: two clients ---------------------------------------------------------------------------------------------


def test_two_clients_do_not_see_each_other(worker: Worker) -> None:
    with RawClient(worker.port) as a, RawClient(worker.port) as b, RawClient(worker.port) as watcher:
        free = watcher.free_memory()
        sum_a = Sum(a, (1, 2, 3, 4), (1, 1, 1, 1))
        sum_b = Sum(b, (5, 6, 7, 8), (2, 2, 2, 2))
        assert sum_a.result() == (2, 3, 4, 5)
        assert sum_b.result() == (7, 8, 9, 10)
        with pytest.raises(EOFError):
            b.get(tensor(9, sum_a.handles[0], sum_a.bases[0]), 16)
        assert sum_a.result() == (2, 3, 4, 5)
        a.sock.close()
        wait_until(lambda: watcher.free_memory() == free)


def test_memory_tells_nothing_of_the_client_before(worker: Worker) -> None:
    record = {"type_": 24, "ne": (4096, 1, 1, 1), "nb": (1, 4096, 4096, 4096)}
    for _ in range(20):
        with RawClient(worker.port) as client:
            handle, base = client.alloc(4096)
            assert client.get(tensor(1, handle, base, **record), 4096) == bytes(4096)
            client.tell(5, struct.pack("<QB", handle, 0x5A))
            assert client.get(tensor(1, handle, base, **record), 4096) == b"\x5a" * 4096


# -- A07: recompute -----------------------------------------------------------------------------------------------


def test_recompute_runs_the_graph_again(client: RawClient) -> None:
    total = Sum(client, (1, 2, 3, 4), (1, 1, 1, 1))
    client.set(total.a, struct.pack("<4f", 10, 20, 30, 40))
    client.tell(16, struct.pack("<I", 0))
    assert total.result() == (11, 21, 31, 41)


def test_a_client_that_knows_no_compute_flag_means_every_node(client: RawClient) -> None:
    assert Sum(client, (1, 2, 3, 4), (10, 20, 30, 40), flags=0).result() == (11, 22, 33, 44)
    assert Sum(client, (1, 2, 3, 4), (1, 1, 1, 1)).result() == (2, 3, 4, 5)
    assert Sum(client, (1, 2, 3, 4), (1, 1, 1, 1), flags=0).result() == (0, 0, 0, 0)  # it does: this one is skipped


def test_an_unknown_op_of_such_a_client_is_refused(client: RawClient) -> None:
    (handle, base) = client.alloc(64)
    client.tell(10, graph(0, [1], [tensor(1, handle, base, op=5000)]))
    assert client.is_closed()


def test_recompute_with_nothing_stored(client: RawClient) -> None:
    client.tell(16, struct.pack("<I", 0))
    assert client.is_closed()


def test_recompute_on_a_device_that_is_not_there(client: RawClient) -> None:
    Sum(client, (1, 2, 3, 4), (1, 1, 1, 1)).result()
    client.tell(16, struct.pack("<I", 7))
    assert client.is_closed()


def test_recompute_on_a_device_without_a_graph(client: RawClient) -> None:
    Sum(client, (1, 2, 3, 4), (1, 1, 1, 1)).result()
    client.tell(16, struct.pack("<I", 1))
    assert client.is_closed()


@pytest.mark.parametrize("reallocate", [False, True])
def test_recompute_after_free(client: RawClient, reallocate: bool) -> None:
    total = Sum(client, (1, 2, 3, 4), (1, 1, 1, 1))
    total.result()
    client.tell(4, struct.pack("<Q", total.handles[1]))
    if reallocate:
        handle, base = client.alloc(64)
        client.set(tensor(2, handle, base), struct.pack("<4f", 9, 9, 9, 9))
    client.tell(16, struct.pack("<I", 0))
    assert client.is_closed()


def test_free_twice(client: RawClient) -> None:
    handle, _ = client.alloc(64)
    client.tell(4, struct.pack("<Q", handle))
    client.tell(4, struct.pack("<Q", handle))
    assert client.is_closed()


# -- A09: tensors and ranges --------------------------------------------------------------------------------------

Bad = Callable[[RawClient, int, int], None]
WRAP = (1 << 64) - 8
HUGE = (1 << 32) - 1

BAD_RANGES: dict[str, Bad] = {
    "unknown-type": lambda c, p, base: c.set(tensor(1, p, base, type_=255), b"x" * 16),
    "removed-type": lambda c, p, base: c.set(tensor(1, p, base, type_=4), b"x" * 16),
    "no-buffer": lambda c, p, base: c.set(tensor(1, 0, 0xDEADBEEF), b"x" * 16),
    "unknown-buffer": lambda c, p, base: c.set(tensor(1, p + 1, base), b"x" * 16),
    "before": lambda c, p, base: c.set(tensor(1, p, base - 4), b"x" * 16),
    "too-long": lambda c, p, base: c.set(tensor(1, p, base, ne=(17, 1, 1, 1)), b"x" * 68),
    "wrapping-offset": lambda c, p, base: c.set(tensor(1, p, base), b"x" * 16, offset=WRAP),
    "offset-behind": lambda c, p, base: c.set(tensor(1, p, base, ne=(16, 1, 1, 1)), b"x", offset=64),
    "offset-over-the-end": lambda c, p, base: c.set(tensor(1, p, base, ne=(16, 1, 1, 1)), b"x" * 8, offset=60),
    "huge-get": lambda c, p, base: c.tell(8, tensor(1, p, base) + struct.pack("<QQ", 0, 1 << 63)),
    "huge-shape": lambda c, p, base: c.set(tensor(1, p, base, ne=(HUGE, HUGE, HUGE, 1)), b"x" * 16),
    "copy-into-less": lambda c, p, base: c.tell(9, tensor(1, p, base, ne=(16, 1, 1, 1)) + tensor(2, p, base)),
    "payload-over-tensor": lambda c, p, base: c.set(tensor(1, p, base), b"x" * 100),
    "unknown-command": lambda c, p, base: c.tell(0x63),
    "missing-source": lambda c, p, base: c.tell(10, graph(0, [1], [tensor(1, p, base, op=2, flags=16, src=(99, 1))])),
    "missing-node": lambda c, p, base: c.tell(10, graph(0, [5], [tensor(1, p, base)])),
    "missing-view": lambda c, p, base: c.tell(10, graph(0, [1], [tensor(1, p, base, op=37, view=(77, 0))])),
    "double-id": lambda c, p, base: c.tell(10, graph(0, [], [tensor(1, p, base), tensor(1, p, base)])),
    "zero-id": lambda c, p, base: c.tell(10, graph(0, [], [tensor(0, p, base)])),
    "graph-outside": lambda c, p, base: c.tell(10, graph(0, [], [tensor(1, p, base + 64)])),
    "graph-of-another-device": lambda c, p, base: c.tell(10, graph(1, [], [tensor(1, p, base)])),
    "too-many-nodes": lambda c, p, base: c.tell(10, graph(0, [1], [tensor(1, p, base)], (1 << 31, 1))),
    "too-many-tensors": lambda c, p, base: c.tell(10, graph(0, [1], [tensor(1, p, base)], (1, 1 << 31))),
    "too-few-tensors": lambda c, p, base: c.tell(10, graph(0, [1], [tensor(1, p, base)] * 2, (1, 1))),
    "memset-wrap": lambda c, p, base: c.tell(17, tensor(1, p, base) + struct.pack("<QQB", WRAP, 16, 1)),
    "clear-unknown": lambda c, p, base: c.tell(5, struct.pack("<QB", p + 1, 1)),
    "init-unknown": lambda c, p, base: c.tell(12, tensor(1, p + 1, base)),
    "base-unknown": lambda c, p, base: c.tell(3, struct.pack("<Q", p + 1)),
    "device-unknown": lambda c, p, base: c.tell(0, struct.pack("<IQ", 2, 64)),
    "batch-outside": lambda c, p, base: c.tell(133, struct.pack("<QI", base + 60, 8) + b"x" * 8),
    "batch-cut": lambda c, p, base: c.tell(133, struct.pack("<QI", base, 100) + b"x" * 8),
    "batch-nowhere": lambda c, p, base: c.tell(133, struct.pack("<QI", 8, 8) + b"x" * 8),
    "read-outside": lambda c, p, base: c.tell(134, struct.pack("<QQ", base + 60, 8)),
    "alloc-size-beyond-64-bits": lambda c, p, base: c.tell(
        13, struct.pack("<I", 0) + tensor(1, ne=(HUGE, HUGE, HUGE, 1), nb=(4, HUGE & ~3, HUGE & ~3, 4)) + bytes(2960)
    ),
    "run-unknown": lambda c, p, base: c.tell(131, struct.pack("<IQ", 0, 1)),
}


@pytest.mark.parametrize("bad", BAD_RANGES.values(), ids=list(BAD_RANGES))
def test_a_bad_range_touches_nothing(client: RawClient, bad: Bad, caplog: pytest.LogCaptureFixture) -> None:
    handle, base = client.alloc(64)
    with RawClient(client.sock.getpeername()[1]) as other:
        sentinel, sentinel_base = other.alloc(64)
        other.tell(5, struct.pack("<QB", sentinel, 0x5A))
        with caplog.at_level(logging.WARNING, "app.rpc"):
            bad(client, handle, base)
            assert hung_up(client)
        assert other.get(tensor(1, sentinel, sentinel_base, ne=(16, 1, 1, 1)), 64) == b"\x5a" * 64
    assert len([record for record in caplog.records if "closed client" in record.getMessage()]) == 1


def hung_up(client: RawClient) -> bool:
    """Whether the connection ends; a Tandem worker may have said why."""
    try:
        while client.sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_empty_tensors_are_nothing_and_no_error(client: RawClient) -> None:
    handle, base = client.alloc(64)
    empty = tensor(1, handle, base, ne=(0, 1, 1, 1))
    client.set(empty, b"")
    client.tell(10, graph(0, [2], [empty, tensor(2, handle, base + 16, ne=(0, 1, 1, 1), op=2, flags=16, src=(1, 1))]))
    assert client.get(empty, 0) == b""


def test_tensors_of_others_may_be_mentioned_but_not_read(client: RawClient) -> None:
    handle, base = client.alloc(64)
    mine, foreign = tensor(1, handle, base), tensor(2, 0, 0, op=4711)
    client.set(mine, struct.pack("<4f", 1, 2, 3, 4))
    doubled = tensor(3, handle, base + 16, op=2, flags=COMPUTE, src=(1, 1))
    client.tell(10, graph(0, [3], [mine, foreign, doubled]))
    assert client.floats(doubled) == (2, 4, 6, 8)
    client.tell(10, graph(0, [3], [mine, foreign, tensor(3, handle, base + 16, op=2, flags=COMPUTE, src=(1, 2))]))
    assert client.is_closed()


# -- A10: what kernels would have to trust ------------------------------------------------------------------------


class Rows:
    """A table of two rows of four floats, one row id, and a result, with a guard around them."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.handle, self.base = client.alloc(256)
        client.tell(5, struct.pack("<QB", self.handle, 0x5A))
        self.table = tensor(1, self.handle, self.base + 64, ne=(4, 2, 1, 1))
        client.set(self.table, struct.pack("<8f", *range(8)))

    def ids(self, *values: int, ne: tuple[int, ...] = (1, 1, 1, 1), wide: bool = False) -> bytes:
        size = 8 if wide else 4
        nb = (size, size * ne[0], size * ne[0] * ne[1], size * ne[0] * ne[1] * ne[2])
        record = tensor(2, self.handle, self.base + 128, type_=I64 if wide else I32, ne=ne, nb=nb)
        self.client.set(record, struct.pack(f"<{len(values)}{'q' if wide else 'i'}", *values))
        return record

    def result(self, op: int, src: tuple[int, ...], **fields: object) -> bytes:
        return tensor(3, self.handle, self.base + 192, op=op, flags=COMPUTE, src=src, **fields)  # type: ignore[arg-type]

    def whole_table(self, op: int, src: tuple[int, ...]) -> bytes:
        """The table as the target of an op that writes into it."""
        return tensor(3, self.handle, self.base + 64, ne=(4, 2, 1, 1), op=op, flags=COMPUTE, src=src, view=(1, 0))

    def compute(self, *records: bytes) -> None:
        self.client.tell(10, graph(0, [3], list(records)))

    def guard_is_whole(self) -> bool:
        with_guard = tensor(9, self.handle, self.base, ne=(64, 1, 1, 1))
        data = self.client.get(with_guard, 256)
        return data[:64] == b"\x5a" * 64 and data[208:] == b"\x5a" * 48


def test_get_rows_of_a_row_that_is_there(client: RawClient) -> None:
    rows = Rows(client)
    result = rows.result(Op.GET_ROWS, (1, 2))
    rows.compute(rows.table, rows.ids(1), result)
    assert client.floats(result) == (4, 5, 6, 7)
    assert rows.guard_is_whole()


@pytest.mark.parametrize("row", [7, 2, -1, -(1 << 31)])
def test_get_rows_of_a_row_that_is_not_there(client: RawClient, row: int) -> None:
    rows = Rows(client)
    rows.compute(rows.table, rows.ids(row), rows.result(Op.GET_ROWS, (1, 2)))
    assert client.is_closed()


def test_set_rows(client: RawClient) -> None:
    rows = Rows(client)
    data = tensor(4, rows.handle, rows.base + 144)
    client.set(data, struct.pack("<4f", 9, 9, 9, 9))
    whole = tensor(
        3, rows.handle, rows.base + 64, ne=(4, 2, 1, 1), op=Op.SET_ROWS, flags=COMPUTE, src=(4, 2, 1), view=(1, 0)
    )
    rows.compute(data, rows.ids(1, wide=True), rows.table, whole)
    assert client.floats(rows.table, 8) == (0, 1, 2, 3, 9, 9, 9, 9)


@pytest.mark.parametrize("row", [2, -1, 1 << 40])
def test_set_rows_of_a_row_that_is_not_there(client: RawClient, row: int) -> None:
    rows = Rows(client)
    data = tensor(4, rows.handle, rows.base + 144)
    whole = tensor(
        3, rows.handle, rows.base + 64, ne=(4, 2, 1, 1), op=Op.SET_ROWS, flags=COMPUTE, src=(4, 2, 1), view=(1, 0)
    )
    rows.compute(data, rows.ids(row, wide=True), rows.table, whole)
    assert client.is_closed()


BAD_OPS: dict[str, Callable[[Rows], tuple[bytes, ...]]] = {
    "ids-of-more-matrices": lambda r: (
        r.table, r.ids(0, 0, ne=(1, 2, 1, 1)), r.result(Op.GET_ROWS, (1, 2), ne=(4, 1, 2, 1)),
    ),
    "add-into-less": lambda r: (r.table, r.result(Op.ADD, (1, 1), ne=(4, 1, 1, 1))),
    "unequal-inner-sizes": lambda r: (
        r.table, tensor(2, r.handle, r.base + 128, ne=(3, 1, 1, 1)), r.result(Op.MUL_MAT, (1, 2), ne=(2, 1, 1, 1)),
    ),
    "norm-of-integers": lambda r: (r.ids(1), r.result(Op.RMS_NORM, (2,), ne=(1, 1, 1, 1))),
    "unknown-op": lambda r: (r.table, r.result(5000, (1,))),
    "missing-operand": lambda r: (r.table, r.result(Op.ADD, (1,), ne=(4, 2, 1, 1))),
    "itself": lambda r: (r.result(Op.ADD, (3, 3)),),
}  # fmt: skip


@pytest.mark.parametrize("records", BAD_OPS.values(), ids=list(BAD_OPS))
def test_an_illegal_op_is_refused_before_it_runs(
    client: RawClient, records: Callable[[Rows], tuple[bytes, ...]]
) -> None:
    rows = Rows(client)
    rows.compute(*records(rows))
    assert client.is_closed()


# -- A12: sizes, pieces, big transfers ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", [6, 10])
def test_a_giant_announcement_costs_nothing(client: RawClient, command: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client.send(frame(command, bytes(16), size=1 << 62))
    if command == 10:
        assert client.is_closed()
    with RawClient(client.sock.getpeername()[1]) as other:
        assert Sum(other, (1, 2, 3, 4), (1, 1, 1, 1)).result() == (2, 3, 4, 5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("size", [13, 1 << 40])
def test_a_wrong_fixed_size_is_refused_at_once(client: RawClient, size: int) -> None:
    client.send(frame(0, b"", size=size))
    assert client.is_closed()


def test_a_header_may_come_byte_by_byte(client: RawClient) -> None:
    for byte in frame(1, struct.pack("<I", 0)):
        client.send(bytes([byte]))
    assert client.answer() == struct.pack("<Q", 64)


def test_half_a_header_holds_nobody_up(client: RawClient) -> None:
    client.send(frame(1)[:5])
    with RawClient(client.sock.getpeername()[1]) as other:
        assert Sum(other, (1, 2, 3, 4), (1, 1, 1, 1)).result() == (2, 3, 4, 5)


def test_hundreds_of_half_greetings_hold_nobody_up(worker: Worker) -> None:
    strangers = [RawClient(worker.port, hello=False) for _ in range(300)]
    try:
        for stranger in strangers:
            stranger.send(frame(14, bytes(24))[:20])
        threads = threading.active_count()
        with RawClient(worker.port) as other:
            assert Sum(other, (1, 2, 3, 4), (1, 1, 1, 1)).result() == (2, 3, 4, 5)
            assert threading.active_count() == threads + 1
        strangers[7].send(frame(14, bytes(24))[20:])
        assert strangers[7].answer()[:3] == bytes([7, 0, 0])
    finally:
        for stranger in strangers:
            stranger.sock.close()


def test_half_a_request_is_dropped_in_the_end() -> None:
    settings = WorkerSettings(idle_s=0.5)
    with tcp_worker(NumpyDevice(), settings=settings) as worker, RawClient(worker.port) as client:
        client.send(frame(1)[:5])
        assert client.is_closed()


def test_ten_mebibytes_and_one_byte_arrive_whole(client: RawClient) -> None:
    size = 10 * MIB + 1
    handle, base = client.alloc(size)
    record = tensor(1, handle, base, type_=24, ne=(size, 1, 1, 1), nb=(1, size, size, size))
    data = bytes(range(251)) * (size // 251 + 1)
    client.set(record, data[:size])
    assert client.get(record, size) == data[:size]


# -- A14: refused allocations -------------------------------------------------------------------------------------


def test_an_allocation_beyond_the_limit_is_refused_and_the_figures_are_true(client: RawClient) -> None:
    wait_until(lambda: client.free_memory() == 256 * MIB)  # what earlier clients had
    free = client.free_memory()
    assert client.alloc(free + 1) == (0, 0)
    handle, _ = client.alloc(free)
    assert client.free_memory() == 0
    assert client.alloc(1) == (0, 0)
    client.tell(4, struct.pack("<Q", handle))
    assert client.free_memory() == free
