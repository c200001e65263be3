"""A decode step as one request gives the bytes that its parts give, whatever the device, and is checked as they are."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from app.engine.device import Device, Handle
from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType, Op, TensorFlag
from app.engine.program import Program
from app.engine.rows import WHOLE, RowSelection, RowWish
from app.errors import DeviceError, DeviceLost
from app.rpc.device import RpcDevice
from app.rpc.transfers import SMALL_BYTES
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.programs import placed, sum_program
from tests.rpc.raw import RawClient, graph, tensor
from tests.rpc.workers import connected, remote, tcp_worker

WAIT_S = 30.0
TAKE_TURN, GRAPH_STORE = 144, 130
BEST = RowSelection(4, (RowWish(2, True),))
TERMS = (np.array([1, 2, 3, 4], np.float32), np.array([10, 40, 30, 20], np.float32))


def native() -> Device:
    cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")
    device: Device = cpu.CpuDevice("CPU", 1)
    return device


@pytest.fixture(params=[native, NumpyDevice], ids=["native", "numpy"])
def make_device(request: pytest.FixtureRequest) -> Callable[[], Device]:
    make: Callable[[], Device] = request.param
    return make


@pytest.fixture
def worker(make_device: Callable[[], Device]) -> Iterator[Worker]:
    with tcp_worker(make_device()) as made:
        yield made


@pytest.fixture
def client(worker: Worker) -> Iterator[RawClient]:
    with RawClient(worker.port) as made:
        yield made


class Held:
    """What a raw client has stored: graph 5, which adds four floats at 0 and 128 into 256 of one buffer."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.handle, self.base = client.alloc(4096)
        terms = [tensor(i, self.handle, self.base + at) for i, at in ((1, 0), (2, 128))]
        total = tensor(3, self.handle, self.base + 256, op=2, flags=16, src=(1, 2))
        stored = graph(0, [3], [*terms, total])
        assert client.ask(GRAPH_STORE, stored[:4] + struct.pack("<Q", 5) + stored[4:]) == b""

    def turn(
        self, *items: bytes, at: int = 256, columns: int = 4, wishes: bytes = BEST.packed, graph_id: int = 5
    ) -> bytes:
        head = struct.pack("<IQQII", 0, graph_id, self.base + at, columns, len(wishes))
        return head + wishes + b"".join(items)

    def item(self, offset: int, data: bytes, size: int | None = None) -> bytes:
        return struct.pack("<QI", self.base + offset, len(data) if size is None else size) + data

    @property
    def terms(self) -> list[bytes]:
        return [self.item(at, term.tobytes()) for at, term in zip((0, 128), TERMS, strict=True)]


def refusal(client: RawClient) -> str:
    """The last words of a worker that hangs up."""
    notice = b""
    while part := client.sock.recv(4096):
        notice += part
    assert notice[:8] == b"\xff" * 8
    return notice[12:].decode()


def test_a_turn_writes_runs_and_selects(client: RawClient) -> None:
    held = Held(client)
    sums = np.add(*TERMS)
    for _ in range(3):
        assert client.ask(TAKE_TURN, held.turn(*held.terms)) == bytes(BEST.select(sums.data.cast("B")))
    assert client.ask(TAKE_TURN, held.turn(wishes=RowSelection(4, (WHOLE,)).packed)) == sums.tobytes()
    assert client.ask(TAKE_TURN, held.turn(held.item(0, bytes(16)), wishes=b"")) == b""
    assert client.ask(TAKE_TURN, held.turn(wishes=RowSelection(4, (WHOLE,)).packed)) == TERMS[1].tobytes()


def test_a_turn_may_write_to_several_buffers(client: RawClient) -> None:
    held = Held(client)
    _, other = client.alloc(64)
    far_item = struct.pack("<QI", other, 4) + b"abcd"
    for _ in range(2):
        answer = client.ask(TAKE_TURN, held.turn(*held.terms, far_item))
        assert answer == bytes(BEST.select(np.add(*TERMS).data.cast("B")))
        assert client.ask(134, struct.pack("<QQ", other, 4)) == b"abcd"


def test_a_turn_with_much_to_answer(client: RawClient) -> None:
    held = Held(client)
    many = RowSelection(4, (RowWish(4, False),) * 40_000)
    _, rows = client.alloc(many.source_bytes)
    assert len(client.ask(TAKE_TURN, held.turn(*held.terms, at=rows - held.base, wishes=many.packed))) == many.n_bytes


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda held: held.turn(graph_id=6), "graph 6 of device 0 is not kept"),
        (lambda held: held.turn()[:24] + struct.pack("<I", 99), "99 bytes of wishes, 0 are there"),
        (lambda held: held.turn(wishes=b"abc"), "3 bytes are not whole wishes"),
        (lambda held: held.turn(wishes=struct.pack("<HH", 5, 0)), "the 5 best of 4 columns"),
        (lambda held: held.turn(columns=1 << 20), "at address"),
        (lambda held: held.turn(at=257), "cannot begin at byte 257"),
        (lambda held: held.turn(held.item(4094, b"abcd")), "4 bytes at address"),
        (lambda held: held.turn(held.item(-4, b"abcd")), "4 bytes at address"),
        (lambda held: held.turn(held.item(0, b"ab", size=3)), "announces 3 bytes, 2 are left"),
        (lambda held: held.turn(held.item(0, b"ab"), b"x" * 11), "ends in the middle of an address"),
        (lambda held: held.turn(struct.pack("<QI", (1 << 64) - 2, 4) + b"abcd"), "4 bytes at address"),
    ],
)
@pytest.mark.parametrize("n_before", [0, 2], ids=["at first", "when planned"])
def test_senseless_turns_change_nothing_and_end_the_session(
    worker: Worker, client: RawClient, make: Callable[[Held], bytes], reason: str, n_before: int
) -> None:
    held = Held(client)
    for _ in range(n_before):
        client.ask(TAKE_TURN, held.turn(*held.terms))
    client.tell(TAKE_TURN, make(held))
    assert reason in refusal(client)
    with RawClient(worker.port) as other:
        assert other.alloc(64)[0]


def test_a_freed_buffer_takes_its_turns_with_it(client: RawClient) -> None:
    held = Held(client)
    client.ask(TAKE_TURN, held.turn(*held.terms))
    client.tell(4, struct.pack("<Q", held.handle))
    client.tell(TAKE_TURN, held.turn(*held.terms))
    assert "graph 5 of device 0 is not kept here" in refusal(client)


def steps(far: RpcDevice, n: int) -> list[tuple[bytes, bytes]]:
    """Sums and their best, step by step, of numbers that change."""
    buffer = far.alloc(4096)
    handle = far.prepare(sum_program(buffer))
    found = []
    for number in range(n):
        far.write(buffer, 0, (TERMS[0] * number).data.cast("B"))
        far.write(buffer, 128, TERMS[1].data.cast("B"))
        far.run(handle)
        best = far.read_rows(buffer, 256, BEST).result(WAIT_S)
        far.run(handle)
        found.append((bytes(best), bytes(far.read(buffer, 256, 16).result(WAIT_S))))
    return found


def test_devices_ask_for_turns_where_workers_take_them(make_device: Callable[[], Device]) -> None:
    with remote(make_device()) as far, remote(make_device(), WorkerSettings(extensions=False)) as stock:
        near = make_device()
        assert far.link.takes_turns and not stock.link.takes_turns
        wanted = [np.float32(number) * TERMS[0] + TERMS[1] for number in range(5)]
        assert steps(far, 5) == [(bytes(BEST.select(w.data.cast("B"))), w.tobytes()) for w in wanted]
        counted = far.link.dispatcher.stats().commands
        assert (counted["TAKE_TURN"], counted.get("GRAPH_RUN", 0)) == (10, 0)
        near.close()


@pytest.mark.parametrize(("rest", "n_alone"), [(16, 0), (SMALL_BYTES, 0), (SMALL_BYTES + 4, 2)])
def test_inputs_of_a_few_sequences_are_part_of_the_turn(
    make_device: Callable[[], Device], rest: int, n_alone: int
) -> None:
    """Rows of embeddings are longer than other small writes; those of a prompt do not wait for what follows."""
    with remote(make_device()) as far:
        buffer = far.alloc(2 * SMALL_BYTES)
        handle = far.prepare(sum_program(buffer))
        far.write(buffer, 128, TERMS[1].data.cast("B"))
        filler = bytes(range(251)) * (rest // 251 + 1)
        far.write(buffer, 512, filler[:rest])
        far.write(buffer, 0, TERMS[0].data.cast("B"))
        far.run(handle)
        assert bytes(far.read(buffer, 256, 16).result(WAIT_S)) == np.add(*TERMS).tobytes()
        counted = far.link.dispatcher.stats().commands
        assert (counted["TAKE_TURN"], counted.get("SET_TENSOR", 0)) == (1, n_alone)
        assert bytes(far.read(buffer, 512, rest).result(WAIT_S)) == filler[:rest]


def test_a_turn_behind_bulk_data_does_not_hold_up_the_next_input() -> None:
    """What a prompt's ubatch needs: the session receives while the device computes."""
    gate = threading.Event()

    class Gated(NumpyDevice):
        def run(self, handle: Handle) -> None:
            self._lane.submit(lambda: gate.wait(WAIT_S))
            super().run(handle)

    with tcp_worker(Gated()) as made, connected(made) as (far,):
        buffer = far.alloc(24 << 20)
        handle = far.prepare(sum_program(buffer))
        far.write(buffer, 0, bytes(1 << 20))
        far.write(buffer, 0, TERMS[0].data.cast("B"))
        far.run(handle)
        best = far.read_rows(buffer, 256, BEST)
        far.write(buffer, 0, bytes(24 << 20)).result(WAIT_S)
        assert not best.done()
        gate.set()
        assert bytes(best.result(WAIT_S)) == bytes(BEST.select(TERMS[0].data.cast("B")))


def test_what_rode_in_a_turn_that_fails_before_it_leaves_is_done_all_the_same(
    make_device: Callable[[], Device],
) -> None:
    """An error of the lane is told by the read; the writes and the run in front of it have happened."""
    with remote(make_device()) as far:
        buffer = far.alloc(4096)
        handle = far.prepare(sum_program(buffer))
        released = far.prepare(sum_program(buffer))
        far.release(released)
        far.run(released)
        for at, term in zip((0, 128), TERMS, strict=True):
            far.write(buffer, at, term.data.cast("B"))
        far.run(handle)
        with pytest.raises(DeviceError, match="released"):
            far.read_rows(buffer, 256, BEST).result(WAIT_S)
        assert bytes(far.read(buffer, 256, 16).result(WAIT_S)) == np.add(*TERMS).tobytes()


def test_bytes_that_come_after_a_loss_trouble_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has them may be another device's thread."""
    with remote(NumpyDevice("CPU")) as far:
        later: Future[bytes] = Future()
        sent = far.write(far.alloc(64), 0, later, size_bytes=16)
        far.link.dispatcher.lose("cut")
        later.set_result(bytes(16))
        with pytest.raises(DeviceLost, match="cut"):
            sent.result(WAIT_S)
    assert not [record for record in caplog.records if record.name == "concurrent.futures"]


def test_a_turn_that_fails_ends_the_session_with_the_reason() -> None:
    """Row numbers are data: the native device sees a wrong one while it computes."""
    device = native()
    with tcp_worker(device) as made, connected(made) as (far,):
        buffer = far.alloc(4096)
        rows = placed(buffer, 0, ne=(4, 4, 1, 1))
        wanted = placed(buffer, 512, type_=GGMLType.I32, ne=(1, 1, 1, 1))
        found = placed(buffer, 256, op=Op.GET_ROWS, src=(0, 1), flags=TensorFlag.COMPUTE)
        handle = far.prepare(Program("rows", (rows, wanted, found), (2,)))
        for number, is_wrong in ((1, False), (99, True)):
            far.write(buffer, 512, struct.pack("<i", number))
            far.run(handle)
            answer = far.read_rows(buffer, 256, BEST)
            if not is_wrong:
                answer.result(WAIT_S)
                continue
            with pytest.raises(DeviceLost, match="99"):
                answer.result(WAIT_S)
    other = native()
    other.close()


def test_a_turn_that_runs_out_of_memory_ends_its_own_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises must not wait in the device's lane for the next client."""
    device = native()
    cpu = pytest.importorskip("app.engine.devices.cpu")
    with tcp_worker(device) as made, RawClient(made.port) as one, RawClient(made.port) as other:
        mine, theirs = Held(one), Held(other)
        sums = bytes(BEST.select(np.add(*TERMS).data.cast("B")))
        assert one.ask(TAKE_TURN, mine.turn(*mine.terms)) == sums

        class Poor:
            def run(self, items: memoryview, out: memoryview) -> str:
                raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(cpu.CpuTurn, "run", with_native(cpu.CpuTurn.run, Poor()))
            one.tell(TAKE_TURN, mine.turn(*mine.terms))
            assert "refused an allocation" in refusal(one)
        assert other.ask(TAKE_TURN, theirs.turn(*theirs.terms)) == sums
        other.tell(131, struct.pack("<IQ", 0, 5))
        assert other.ask(1, struct.pack("<I", 0))


def with_native(run: Callable[..., bool], poor: object) -> Callable[..., bool]:
    """`CpuTurn.run` over another native turn."""

    def patched(turn: object, items: memoryview, out: memoryview) -> bool:
        turn._native = poor  # type: ignore[attr-defined]
        return run(turn, items, out)

    return patched


def test_a_turn_waits_for_no_other_client() -> None:
    """While one client's program runs, another's turn takes the queued way, and a third gets its memory."""
    gate, runs = threading.Event(), threading.Event()
    device = native()
    lane = device._lane  # type: ignore[attr-defined]
    with tcp_worker(device) as made, RawClient(made.port) as one, RawClient(made.port) as other:
        held = Held(one)
        one.ask(TAKE_TURN, held.turn(*held.terms))
        lane.allow_blocking(False)
        lane.submit(lambda: (runs.set(), gate.wait(WAIT_S)))
        assert runs.wait(WAIT_S)
        one.tell(TAKE_TURN, held.turn(*held.terms))
        assert other.ask(0, struct.pack("<IQ", 0, 4096))[:8] != bytes(8)
        gate.set()
        assert one.answer() == bytes(BEST.select(np.add(*TERMS).data.cast("B")))
