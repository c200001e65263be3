"""Writes of a few bytes that are still on their way: what goes with them as one turn, and every way that can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from app.engine.device import Handle
from app.engine.devices.numpy import NumpyDevice
from app.engine.mask import CellRun, MaskRecipe, MaskRows
from app.engine.program import Buffer
from app.engine.rows import RowSelection, RowWish
from app.errors import DeviceError, DeviceLost
from app.rpc.device import RpcDevice
from app.rpc.transfers import SMALL_BYTES
from app.rpc.worker import WorkerSettings
from tests.rpc.programs import sum_program
from tests.rpc.workers import connected, remote, tcp_worker, wait_until

WAIT_S = 30.0
BEST = RowSelection(4, (RowWish(2, True),))
TERM = np.array([1, 2, 3, 4], np.float32)
LATE = np.array([10, 40, 30, 20], np.float32)
#: 40 KiB of cells, so that it travels as a recipe.
MASK = MaskRecipe(16, 1280, None, (MaskRows(0, 12, (CellRun(0, 64),)),))


class Broken(Exception):
    """What becomes of bytes that never come."""


def bytes_of(values: np.ndarray) -> memoryview:
    return values.data.cast("B")


@dataclass
class Bench:
    """A program that adds what is at 0 and 128 into 256 of one buffer, and bytes for 0 that are still on their way."""

    far: RpcDevice
    buffer: Buffer
    handle: Handle
    payload: Future[memoryview] = field(default_factory=Future)

    def write(self, at: int, values: np.ndarray) -> None:
        self.far.write(self.buffer, at, bytes_of(values))

    def write_late(self, payload: Future[memoryview] | None = None, at: int = 0) -> Future[None]:
        return self.far.write(self.buffer, at, self.payload if payload is None else payload, size_bytes=16)

    def run(self) -> None:
        self.far.run(self.handle)

    def best(self) -> Future[memoryview]:
        return self.far.read_rows(self.buffer, 256, BEST)

    def read(self, at: int = 256) -> list[float]:
        return np.frombuffer(self.far.read(self.buffer, at, 16).result(WAIT_S), np.float32).tolist()

    @property
    def sent_bytes(self) -> int:
        return self.far.link.dispatcher.stats().sent_bytes

    def commands(self) -> dict[str, int]:
        return dict(self.far.link.dispatcher.stats().commands)

    def fail_in_lane(self) -> None:
        """Something goes wrong that only a read or an event will tell of."""
        released = self.far.prepare(sum_program(self.buffer))
        self.far.release(released)
        self.far.run(released)


def bench_on(far: RpcDevice) -> Bench:
    buffer = far.alloc(1 << 17)
    bench = Bench(far, buffer, far.prepare(sum_program(buffer)))
    bench.write(128, TERM)
    bench.read()
    return bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    with remote(NumpyDevice()) as far:
        yield bench_on(far)


def best_of(values: np.ndarray) -> bytes:
    return bytes(BEST.select(bytes_of(values)))


@pytest.mark.parametrize("with_small", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("rows", [False, True], ids=["read", "rows"])
def test_a_late_write_a_run_and_a_read_leave_as_one_command_when_the_bytes_come(
    bench: Bench, with_small: bool, rows: bool
) -> None:
    before, sent_bytes = bench.commands(), bench.sent_bytes
    if with_small:
        bench.write(128, 2 * TERM)
    sent = bench.write_late()
    bench.run()
    answer = bench.best() if rows else bench.far.read(bench.buffer, 256, 16)
    assert bench.far.link.dispatcher.stats().queued == 1
    assert bench.sent_bytes == sent_bytes and not sent.done()
    bench.payload.set_result(bytes_of(LATE))
    wanted = LATE + (2 if with_small else 1) * TERM
    assert bytes(answer.result(WAIT_S)) == (best_of(wanted) if rows else wanted.tobytes())
    assert sent.result(WAIT_S) is None
    new = {name: n - before.get(name, 0) for name, n in bench.commands().items() if n != before.get(name, 0)}
    assert new == {"TAKE_TURN": 1}


def test_a_late_write_a_run_and_a_push_leave_as_one_command_when_the_bytes_come() -> None:
    with (
        tcp_worker(NumpyDevice()) as one,
        tcp_worker(NumpyDevice()) as other,
        connected(one) as (near,),
        connected(other) as (target,),
    ):
        bench, landing = bench_on(near), target.alloc(64)
        way = near.open_route(target)
        assert way is not None
        for is_good in (True, False, True):
            payload: Future[memoryview] = Future()
            sent = bench.write_late(payload)
            bench.run()
            n_turns, sent_bytes = bench.commands().get("PUSH_TURN", 0), bench.sent_bytes
            departure = way.push(bench.buffer, 256, 16)
            arrived = departure.arrive(landing, 0)
            assert bench.commands()["PUSH_TURN"] == n_turns + 1 and bench.sent_bytes == sent_bytes
            if is_good:
                payload.set_result(bytes_of(LATE))
                arrived.result(WAIT_S)
                departure.left.result(WAIT_S)
                assert sent.result(WAIT_S) is None
            else:  # the receiver's part is never sent either, or it would wait in vain
                payload.set_exception(Broken())
                for future in (departure.left, arrived, sent):
                    assert isinstance(future.exception(WAIT_S), Broken)
                with pytest.raises(Broken):  # the receiver's lane has lost an input
                    target.read(landing, 0, 16).result(WAIT_S)
                target.write(landing, 0, bytes(16))
            found = np.frombuffer(target.read(landing, 0, 16).result(WAIT_S), np.float32)
            assert found.tolist() == ((LATE + TERM) * is_good).tolist()


def test_bytes_that_are_there_already_are_no_part_of_the_turn(bench: Bench) -> None:
    bench.payload.set_result(bytes_of(LATE))
    sent = bench.write_late()
    assert sent.result(WAIT_S) is None
    bench.run()
    assert bytes(bench.best().result(WAIT_S)) == best_of(LATE + TERM)


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (lambda payload: payload.set_exception(Broken("no bytes")), Broken, "no bytes"),
        (lambda payload: payload.set_result(memoryview(bytes(12))), DeviceError, "16 bytes was announced.*12 came"),
        (lambda payload: payload.set_result(memoryview(bytes(20))), DeviceError, "16 bytes was announced.*20 came"),
    ],
    ids=["error", "too few", "too many"],
)
@pytest.mark.parametrize("with_small", [False, True], ids=["alone", "with others"])
def test_a_turn_whose_bytes_do_not_come_fails_once_and_what_rode_in_front_is_done(
    bench: Bench, with_small: bool, spoil: Callable[[Future[memoryview]], None], kind: type[Exception], words: str
) -> None:
    if with_small:
        bench.write(128, 7 * TERM)
    sent = bench.write_late()
    bench.run()
    answer = bench.best()
    after = bench.far.read(bench.buffer, 128, 16)
    spoil(bench.payload)
    for future in (answer, sent):
        with pytest.raises(kind, match=words):
            future.result(WAIT_S)
    wanted = (7 if with_small else 1) * TERM
    assert bytes(after.result(WAIT_S)) == wanted.tobytes()  # told once, and the lane goes on
    assert bench.read(256) == [0.0] * 4, "a run without its input"
    good: Future[memoryview] = Future()
    bench.write_late(good)
    bench.run()
    answer = bench.best()
    good.set_result(bytes_of(LATE))
    assert bytes(answer.result(WAIT_S)) == best_of(LATE + wanted)


def test_a_late_write_that_nothing_follows_leaves_by_itself(bench: Bench) -> None:
    bench.write(512, 3 * TERM)
    sent = bench.write_late()
    assert not sent.done()
    bench.payload.set_result(bytes_of(LATE))
    assert sent.result(WAIT_S) is None
    assert bench.read(0) == LATE.tolist() and bench.read(512) == (3 * TERM).tolist()


def test_a_late_write_that_nothing_follows_fails_by_itself_and_the_next_read_tells(bench: Bench) -> None:
    bench.write(512, 3 * TERM)
    sent = bench.write_late()
    bench.payload.set_exception(Broken())
    with pytest.raises(Broken):
        sent.result(WAIT_S)
    with pytest.raises(Broken):
        bench.best().result(WAIT_S)
    assert bench.read(0) == [0.0] * 4 and bench.read(512) == (3 * TERM).tolist()


@pytest.mark.parametrize("first", [0, 1], ids=["in order", "the second first"])
def test_of_two_late_writes_the_last_is_part_of_the_turn(bench: Bench, first: int) -> None:
    before = bench.commands().get("TAKE_TURN", 0)
    payloads: list[Future[memoryview]] = [Future(), Future()]
    values = (5 * TERM, LATE)
    sent = [bench.write_late(payload, at) for payload, at in zip(payloads, (128, 0), strict=True)]
    bench.run()
    answer = bench.best()
    payloads[first].set_result(bytes_of(values[first]))
    assert not answer.done() and sent[1].done() is False
    payloads[1 - first].set_result(bytes_of(values[1 - first]))
    assert bytes(answer.result(WAIT_S)) == best_of(5 * TERM + LATE)
    assert [one.result(WAIT_S) for one in sent] == [None, None]
    assert bench.commands()["TAKE_TURN"] == before + 1


def small_write(bench: Bench) -> None:
    bench.write(128, 5 * TERM)


def mask(bench: Bench) -> None:
    bench.far.write_mask(bench.buffer, 1 << 16, MASK)


def bulk_write(bench: Bench) -> None:
    bench.far.write(bench.buffer, 4096, bytes(SMALL_BYTES + 4))


def copy(bench: Bench) -> None:
    bench.far.copy(bench.buffer, 0, bench.buffer, 1024, 16)


def fill(bench: Bench) -> None:
    bench.far.fill(bench.buffer, 128, 16, 0)


def event(bench: Bench) -> None:
    bench.far.record()


def another_run(bench: Bench) -> None:
    bench.run()


OTHERS = [small_write, mask, bulk_write, copy, fill, event, another_run]


def alone(device: NumpyDevice, other: Callable[[Bench], None], *, runs_first: bool) -> list[float]:
    """The same on a device that is here."""
    buffer = device.alloc(1 << 17)
    near = Bench(device, buffer, device.prepare(sum_program(buffer)))  # type: ignore[arg-type]
    near.write(128, TERM)
    near.write(0, LATE)
    if runs_first:
        near.run()
    other(near)
    near.run()
    return near.read()


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("runs_first", [False, True], ids=["behind the write", "behind the run"])
def test_whatever_comes_behind_a_late_write_keeps_its_place(
    bench: Bench, other: Callable[[Bench], None], runs_first: bool
) -> None:
    device = NumpyDevice()
    wanted = alone(device, other, runs_first=runs_first)
    device.close()
    sent_bytes, sent = bench.sent_bytes, bench.write_late()
    if runs_first:
        bench.run()
    other(bench)
    bench.run()
    answer = bench.best()
    assert bench.sent_bytes == sent_bytes and not answer.done()
    bench.payload.set_result(bytes_of(LATE))
    assert bytes(answer.result(WAIT_S)) == best_of(np.array(wanted, np.float32))
    assert bench.read() == wanted and sent.result(WAIT_S) is None


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("runs_first", [False, True], ids=["behind the write", "behind the run"])
def test_what_comes_behind_a_late_write_that_fails_is_done_and_the_first_answer_tells(
    bench: Bench, other: Callable[[Bench], None], runs_first: bool
) -> None:
    sent = bench.write_late()
    if runs_first:
        bench.run()
    other(bench)
    bench.run()
    answer = bench.best()
    bench.payload.set_exception(Broken())
    with pytest.raises(Broken):
        sent.result(WAIT_S)
    if other is not event:  # which has told of it already
        with pytest.raises(Broken):
            answer.result(WAIT_S)
    terms = {small_write: 5 * TERM, fill: 0 * TERM}.get(other, TERM)
    assert bench.read() == terms.tolist() and bench.read(128) == terms.tolist()


@pytest.mark.parametrize("with_small", [False, True], ids=["alone", "with others"])
def test_an_earlier_error_is_told_at_the_turn_and_the_turn_is_done_all_the_same(bench: Bench, with_small: bool) -> None:
    bench.fail_in_lane()
    if with_small:
        bench.write(128, 7 * TERM)
    bench.write_late()
    bench.run()
    answer = bench.best()
    bench.payload.set_result(bytes_of(LATE))
    with pytest.raises(DeviceError, match="released"):
        answer.result(WAIT_S)
    assert bench.read() == (LATE + (7 if with_small else 1) * TERM).tolist()


def test_of_an_earlier_error_and_bytes_that_do_not_come_the_earlier_is_told_and_once(bench: Bench) -> None:
    bench.fail_in_lane()
    bench.write(128, 7 * TERM)
    bench.write_late()
    bench.run()
    answer = bench.best()
    bench.payload.set_exception(Broken())
    with pytest.raises(DeviceError, match="released"):
        answer.result(WAIT_S)
    assert bench.read() == [0.0] * 4 and bench.read(128) == (7 * TERM).tolist()


@pytest.mark.parametrize("with_run", [False, True], ids=["alone", "as a turn"])
def test_a_connection_that_is_lost_fails_the_late_write_and_all_behind_it(
    bench: Bench, with_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = [bench.write_late()]
    if with_run:
        bench.run()
        waiting.append(bench.best())
    bench.far.link.dispatcher.lose("the cable was pulled")
    for future in waiting:
        with pytest.raises(DeviceLost, match="cable"):
            future.result(WAIT_S)
    bench.payload.set_result(bytes_of(LATE))
    with pytest.raises(DeviceLost, match="cable"):
        bench.write_late()
    assert not caplog.records


def test_a_loss_between_a_late_write_and_its_turn_is_told_to_both(bench: Bench) -> None:
    """The connection is lost, and nobody has been told of it yet."""
    bench.far.link.dispatcher.close()
    sent = bench.far._sender.write_later(bench.buffer, 0, bench.payload, 16)  # type: ignore[arg-type]
    bench.far._sender.run("GRAPH_RUN", bench.handle.frame)  # type: ignore[attr-defined]
    with pytest.raises(DeviceLost):
        bench.far._sender.read_rows(bench.buffer, 256, BEST, None)  # type: ignore[arg-type]
    with pytest.raises(DeviceLost):
        sent.result(WAIT_S)


@pytest.mark.parametrize("n_bytes", [SMALL_BYTES, SMALL_BYTES + 4])
def test_many_bytes_that_are_late_are_a_command_of_their_own(bench: Bench, n_bytes: int) -> None:
    before = bench.commands().get("SET_TENSOR", 0)
    late = np.zeros(n_bytes // 4, np.float32)
    late[:4], late[32:36] = LATE, TERM
    sent = bench.far.write(bench.buffer, 0, bench.payload, size_bytes=n_bytes)
    bench.run()
    answer = bench.best()
    bench.payload.set_result(bytes_of(late))
    assert bytes(answer.result(WAIT_S)) == best_of(LATE + TERM) and sent.result(WAIT_S) is None
    assert bench.commands().get("SET_TENSOR", 0) - before == (n_bytes > SMALL_BYTES)


def test_workers_that_take_no_turns_get_late_writes_as_such() -> None:
    with remote(NumpyDevice(), WorkerSettings(extensions=False)) as far:
        bench = bench_on(far)
        sent = bench.write_late()
        bench.run()
        answer = far.read(bench.buffer, 256, 16)
        bench.payload.set_result(bytes_of(LATE))
        assert bytes(answer.result(WAIT_S)) == (LATE + TERM).tobytes() and sent.result(WAIT_S) is None


def test_bytes_may_come_at_any_moment(bench: Bench) -> None:
    """Another thread brings them while this one queues what belongs to them."""
    go = threading.Semaphore(0)
    payloads: list[Future[memoryview]] = [Future() for _ in range(300)]

    def bring() -> None:
        for number, payload in enumerate(payloads):
            assert go.acquire(timeout=WAIT_S)
            payload.set_result(bytes_of(number * LATE))

    thread = threading.Thread(target=bring)
    thread.start()
    found, sent = [], []
    for payload in payloads:
        go.release()
        sent.append(bench.write_late(payload))
        bench.run()
        found.append(bench.best())
    thread.join()
    for number, answer in enumerate(found):
        assert bytes(answer.result(WAIT_S)) == best_of(number * LATE + TERM)
    wait_until(lambda: all(one.done() for one in sent))
    assert all(one.exception() is None for one in sent)
