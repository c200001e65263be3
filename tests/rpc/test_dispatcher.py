"""One connection's order, gates, deadlines and end, against a far end that answers by hand."""

from __future__ import annotations

import socket
import struct
import threading
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from app.errors import DeviceError, DeviceLost
from app.rpc.endpoint import Timeouts
from app.rpc.messages import GetAlignment, GetTensor, GraphRun, Ping, ReadRegion, SetTensor, Value
from app.rpc.outbox import SKIP, LaneState
from app.rpc.protocol import encode_error_notice
from app.rpc.wire import region
from tests.rpc.far_end import dispatcher_pair, in_thread
from tests.rpc.workers import wait_until

WAIT_S = 20.0
MIB = 1 << 20


def test_commands_leave_before_answers_come() -> None:
    with dispatcher_pair() as (dispatcher, far):
        asked = [dispatcher.ask(Ping(i)) for i in range(5)]
        dispatcher.tell(GraphRun(0, 1))
        assert [far.request() for _ in range(5)] == [Ping(i) for i in range(5)]
        assert far.request() == GraphRun(0, 1)
        assert not any(future.done() for future in asked)
        far.sock.sendall(b"".join(struct.pack("<QQ", 8, 10 + i) for i in range(5)))
        assert [future.result(WAIT_S) for future in asked] == [Value(10 + i) for i in range(5)]


def test_a_cancelled_waiter_keeps_its_place() -> None:
    with dispatcher_pair() as (dispatcher, far):
        first, second, third = (dispatcher.ask(Ping(i)) for i in range(3))
        assert second.cancel()
        for i in range(3):
            assert far.request() == Ping(i)
            far.value(i)
        assert first.result(WAIT_S) == Value(0)
        assert third.result(WAIT_S) == Value(2)


def test_a_cancelled_read_leaves_the_callers_memory_alone() -> None:
    with dispatcher_pair() as (dispatcher, far):
        memory = bytearray(b"mine")
        read = dispatcher.ask(ReadRegion(0, 4), into=memoryview(memory))
        assert read.cancel()
        after = dispatcher.ask(Ping(1))
        far.request()
        far.request()
        far.answer(b"theirs"[:4])
        far.value(1)
        assert after.result(WAIT_S) == Value(1)
        assert memory == b"mine"


def test_an_answer_lands_in_the_callers_memory() -> None:
    with dispatcher_pair() as (dispatcher, far):
        memory = np.zeros(3 * MIB, np.uint8)
        read = dispatcher.ask(ReadRegion(0, memory.size), into=memory.data)
        data = np.random.default_rng(1).integers(0, 256, memory.size, np.uint8)
        far.request()
        far.answer(data.tobytes())
        result = read.result(WAIT_S)
        assert np.shares_memory(np.frombuffer(result, np.uint8), memory)
        assert (memory == data).all()


@pytest.mark.parametrize("cuts", [(), (3,), (8,), (5, 9, 5000), tuple(range(1, 40))])
def test_who_waits_for_a_long_answer_gets_it_however_it_comes(cuts: tuple[int, ...]) -> None:
    data = np.random.default_rng(4).integers(0, 256, 200_000, np.uint8).tobytes()
    wire = struct.pack("<Q", len(data)) + data
    with dispatcher_pair() as (dispatcher, far):
        for _ in range(3):
            read, after = dispatcher.ask(ReadRegion(0, len(data))), dispatcher.ask(Ping(1))
            far.request()
            far.request()

            def far_side() -> None:
                for begin, end in zip((0, *cuts), (*cuts, len(wire)), strict=True):
                    far.sock.sendall(wire[begin:end])
                far.value(7)

            with in_thread(far_side):
                assert bytes(read.result()) == data
                assert after.result() == Value(7)


def test_who_waits_for_a_long_answer_hears_why_it_will_not_come() -> None:
    notice = encode_error_notice("the oven is out of gas")
    with dispatcher_pair() as (dispatcher, far):
        read = dispatcher.ask(ReadRegion(0, 200_000))
        far.request()

        def far_side() -> None:
            for at in range(len(notice)):
                far.sock.sendall(notice[at : at + 1])
            far.sock.shutdown(socket.SHUT_WR)

        with in_thread(far_side), pytest.raises(DeviceLost, match="the worker says: the oven is out of gas"):
            read.result()


def test_big_transfers_in_both_directions_do_not_block_each_other() -> None:
    """The far end writes all of its answer before it reads one more byte, and we have as much to say."""
    size = 32 * MIB
    out = np.random.default_rng(2).integers(0, 256, size, np.uint8)
    with dispatcher_pair() as (dispatcher, far):
        tensor = region(1, 0, size)
        read = dispatcher.ask(GetTensor(tensor, 0, size))
        sent: Future[None] = Future()
        dispatcher.tell(SetTensor(tensor, 0, 0), out.data, sent=sent)

        def far_side() -> None:
            assert far.request() == GetTensor(tensor, 0, size)
            far.answer(bytes(size))
            assert far.request() == SetTensor(tensor, 0, 0)
            assert far.payload() == out.tobytes()

        with in_thread(far_side):
            assert len(read.result(WAIT_S)) == size
            sent.result(WAIT_S)


def test_a_payload_that_is_not_there_yet_holds_its_place() -> None:
    tensor = region(1, 0, 5)
    with dispatcher_pair() as (dispatcher, far):
        gate: Future[bytes] = Future()
        dispatcher.tell(SetTensor(tensor, 0, 0), payload_bytes=5, gate=gate)
        after = dispatcher.ask(Ping(1))
        assert far.has_nothing()
        assert dispatcher.stats().queued == 2
        gate.set_result(b"hello")
        assert far.request() == SetTensor(tensor, 0, 0)
        assert far.payload() == b"hello"
        assert far.request() == Ping(1)
        far.value(1)
        assert after.result(WAIT_S) == Value(1)


def test_a_skipped_command_is_not_sent() -> None:
    with dispatcher_pair() as (dispatcher, far):
        gate: Future[object] = Future()
        sent: Future[None] = Future()
        dispatcher.tell(SetTensor(region(1, 0, 5), 0, 0), payload_bytes=5, gate=gate, sent=sent)
        dispatcher.ask(Ping(1))
        gate.set_result(SKIP)
        assert sent.result(WAIT_S) is None
        assert far.request() == Ping(1)


@pytest.mark.parametrize("how", ["fails", "is cancelled", "has another size"])
def test_a_payload_that_never_comes_surfaces_at_the_next_read(how: str) -> None:
    lane = LaneState()
    with dispatcher_pair() as (dispatcher, far):
        gate: Future[bytes] = Future()
        sent: Future[None] = Future()
        dispatcher.tell(SetTensor(region(1, 0, 5), 0, 0), payload_bytes=5, gate=gate, lane=lane, sent=sent)
        dispatcher.tell(GraphRun(0, 1), lane=lane)
        first = dispatcher.ask(GetAlignment(0), lane=lane, surfaces=True)
        second = dispatcher.ask(GetAlignment(1), lane=lane, surfaces=True)
        if how == "fails":
            gate.set_exception(DeviceError("the stage before failed"))
        elif how == "is cancelled":
            gate.cancel()
        else:
            gate.set_result(b"four")
        expected = CancelledError if how == "is cancelled" else DeviceError
        with pytest.raises(expected):
            sent.result(WAIT_S)
        with pytest.raises(expected):
            first.result(WAIT_S)
        assert far.request() == GraphRun(0, 1)
        assert far.request() == GetAlignment(1)
        far.value(32)
        assert second.result(WAIT_S) == Value(32)


def test_many_threads_submit_at_once() -> None:
    with dispatcher_pair() as (dispatcher, far):
        n_threads, n_each = 8, 100

        def far_side() -> None:
            for _ in range(n_threads * n_each):
                request = far.request()
                assert isinstance(request, Ping)
                far.value(request.nonce)

        def submit(base: int) -> None:
            asked = [(base + i, dispatcher.ask(Ping(base + i))) for i in range(n_each)]
            assert all(future.result(WAIT_S) == Value(nonce) for nonce, future in asked)

        with in_thread(far_side):
            threads = [threading.Thread(target=submit, args=(1000 * i,)) for i in range(n_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        stats = dispatcher.stats()
        assert stats.commands == {"PING": n_threads * n_each}
        assert stats.answers == sum(stats.round_trips) == n_threads * n_each
        assert stats.sent_bytes == 17 * stats.answers
        assert stats.received_bytes == 16 * stats.answers
        assert (stats.queued, stats.in_flight) == (0, 0)


# -- the end of a connection --------------------------------------------------------------------------------------


def lost(future: Future[object], cause: str) -> DeviceLost:
    with pytest.raises(DeviceLost, match=cause) as caught:
        future.result(WAIT_S)
    return caught.value


def test_everything_fails_when_the_far_end_goes() -> None:
    with dispatcher_pair() as (dispatcher, far):
        gate: Future[bytes] = Future()
        ping = dispatcher.ask(Ping(1))
        read = dispatcher.ask(ReadRegion(0, 100))
        sent: Future[None] = Future()
        dispatcher.tell(SetTensor(region(1, 0, 5), 0, 0), payload_bytes=5, gate=gate, sent=sent)
        queued = dispatcher.ask(Ping(2))
        far.request()
        far.value(1)
        far.request()
        far.sock.sendall(struct.pack("<Q", 100) + b"half")
        far.sock.close()
        assert ping.result(WAIT_S) == Value(1)
        assert lost(read, "closed the connection|reset by peer").command == "READ_REGION"
        # what had not left, and what comes later, tell what the worker was at
        assert lost(sent, "closed the connection|reset by peer").command == "READ_REGION"
        assert lost(queued, "closed the connection|reset by peer").command == "READ_REGION"
        with pytest.raises(DeviceLost, match="during READ_REGION") as caught:
            dispatcher.ask(Ping(3))
        assert caught.value.endpoint == "far:1"
        gate.set_result(b"hello")  # too late, and harmless


def test_a_far_end_that_goes_while_we_write() -> None:
    with dispatcher_pair() as (dispatcher, far):
        sent: Future[None] = Future()
        payload = memoryview(bytearray(32 * MIB))
        dispatcher.tell(SetTensor(region(1, 0, len(payload)), 0, 0), payload, sent=sent)
        queued = dispatcher.ask(Ping(1))
        far.request()
        far.sock.close()
        for future in (sent, queued):
            assert lost(future, "reset by peer|[Bb]roken pipe|closed the connection").command == "SET_TENSOR"
        with pytest.raises(DeviceLost, match="during SET_TENSOR"):
            dispatcher.ask(Ping(2))


def test_a_far_end_that_goes_while_nothing_is_in_flight() -> None:
    with dispatcher_pair() as (dispatcher, far):
        far.sock.close()
        wait_until(lambda: dispatcher.lost is not None)
        with pytest.raises(DeviceLost, match="during PING"):
            dispatcher.ask(Ping(1))


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (struct.pack("<QQ", 9, 1), "the answer to PING announces 9 bytes, allowed are 8"),
        (struct.pack("<Q", 1 << 63), "the answer to PING announces"),
        (encode_error_notice("no such device"), "the worker says: no such device"),
    ],
)
def test_a_wrong_answer_ends_the_connection(said: bytes, cause: str) -> None:
    with dispatcher_pair() as (dispatcher, far):
        ping = dispatcher.ask(Ping(1))
        far.sock.sendall(said)
        lost(ping, cause)


def test_last_words_are_heard_also_when_nothing_was_asked() -> None:
    notice = encode_error_notice("the oven is out of gas")
    with dispatcher_pair() as (dispatcher, far):
        far.sock.sendall(notice[:9])
        far.sock.sendall(notice[9:])
        wait_until(lambda: dispatcher.lost is not None)
        with pytest.raises(DeviceLost, match="the worker says: the oven is out of gas"):
            dispatcher.ask(Ping(1))


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    with dispatcher_pair(tandem=False) as (dispatcher, far):
        ping = dispatcher.ask(Ping(1))
        far.request()
        far.sock.sendall(struct.pack("<QQQQ", 8, 1, 8, 2))
        assert ping.result(WAIT_S) == Value(1)
        wait_until(lambda: dispatcher.lost is not None)
        with pytest.raises(DeviceLost, match="nobody asked for"):
            dispatcher.ask(Ping(2))


def test_no_answer_in_time() -> None:
    with dispatcher_pair(Timeouts(answer_s=0.2)) as (dispatcher, far):
        ping = dispatcher.ask(Ping(1))
        assert far.request() == Ping(1)
        lost(ping, "no answer to PING within 0.2 s")


def test_waiting_for_nothing_has_no_deadline() -> None:
    with dispatcher_pair(Timeouts(answer_s=0.05, idle_s=0.05)) as (dispatcher, far):
        assert far.has_nothing()
        assert dispatcher.lost is None


def test_an_answer_that_stops_in_the_middle() -> None:
    with dispatcher_pair(Timeouts(answer_s=30, idle_s=0.2)) as (dispatcher, far):
        read = dispatcher.ask(ReadRegion(0, 10_000))
        far.request()
        far.sock.sendall(struct.pack("<Q", 10_000) + b"some")
        lost(read, "stopped in the middle for 0.2 s")


def test_a_worker_that_takes_nothing() -> None:
    with dispatcher_pair(Timeouts(answer_s=0.2)) as (dispatcher, _):
        sent: Future[None] = Future()
        payload = memoryview(bytearray(32 * MIB))
        dispatcher.tell(SetTensor(region(1, 0, len(payload)), 0, 0), payload, sent=sent)
        lost(sent, "took no bytes for 0.2 s")


def test_closing_twice_and_using_it_afterwards() -> None:
    with dispatcher_pair() as (dispatcher, _):
        ping = dispatcher.ask(Ping(1))
        dispatcher.close()
        dispatcher.close()
        lost(ping, "closed by this side")
        with pytest.raises(DeviceLost):
            dispatcher.ask(Ping(2))


def test_an_owner_may_give_a_connection_up() -> None:
    with dispatcher_pair() as (dispatcher, _):
        ping = dispatcher.ask(Ping(1))
        dispatcher.lose("three heartbeats were missed")
        lost(ping, "three heartbeats were missed")
