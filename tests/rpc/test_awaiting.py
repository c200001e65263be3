"""Who waits for an answer reads the connection: no answer is lost, late or in the wrong hands, whoever reads."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from app.errors import DeviceLost
from app.rpc.answer_reader import RESTS_AFTER
from app.rpc.dispatcher import Dispatcher
from app.rpc.messages import Ping, ReadRegion, SetTensor, Value
from app.rpc.outbox import SKIP
from app.rpc.wire import region
from tests.rpc.far_end import FarEnd, dispatcher_pair, in_thread
from tests.rpc.workers import wait_until

WAIT_S = 10.0
MIB = 1 << 20


def echo(far: FarEnd, n: int) -> None:
    for _ in range(n):
        request = far.request()
        assert isinstance(request, Ping)
        far.value(request.nonce)


def make_rest(dispatcher: Dispatcher, far: FarEnd) -> None:
    """So many answers are read by who waits for them that the reader's own thread rests."""
    n = 2 * RESTS_AFTER
    with in_thread(lambda: echo(far, n)):
        for nonce in range(n):
            assert dispatcher.ask(Ping(nonce)).result() == Value(nonce)


def waiting(future: Future[Any], answers: list[Any]) -> threading.Thread:
    """Waits for a future without a limit, in a thread of its own, and keeps what comes."""

    def wait() -> None:
        try:
            answers.append(future.result())
        except DeviceLost as error:
            answers.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def reads(dispatcher: Dispatcher) -> bool:
    return dispatcher._reader._waiter is not None


def test_the_waiter_reads_for_itself() -> None:
    readers: list[int] = []
    with dispatcher_pair() as (dispatcher, far):
        make_rest(dispatcher, far)
        asked = dispatcher.ask(Ping(1))
        asked.add_done_callback(lambda _: readers.append(threading.get_ident()))
        with in_thread(lambda: (wait_until(lambda: reads(dispatcher)), echo(far, 1))):
            assert asked.result() == Value(1)
    assert readers == [threading.get_ident()]


def test_answers_that_nobody_waits_for_come_all_the_same() -> None:
    with dispatcher_pair() as (dispatcher, far):
        make_rest(dispatcher, far)
        done = threading.Event()
        dispatcher.ask(Ping(1)).add_done_callback(lambda _: done.set())
        echo(far, 1)
        assert done.wait(WAIT_S)


def test_a_waiter_leaves_what_is_behind_its_answer_to_others() -> None:
    with dispatcher_pair() as (dispatcher, far):
        make_rest(dispatcher, far)
        first, second = dispatcher.ask(Ping(1)), dispatcher.ask(Ping(2))
        with in_thread(lambda: (wait_until(lambda: reads(dispatcher)), echo(far, 1))):
            assert first.result() == Value(1)
        echo(far, 1)
        assert second.result(WAIT_S) == Value(2)


def test_several_wait_on_one_connection() -> None:
    n_threads, n_each = 4, 200

    def ask(base: int, failures: list[int]) -> None:
        for nonce in range(base, base + n_each):
            if dispatcher.ask(Ping(nonce)).result() != Value(nonce):
                failures.append(nonce)

    with dispatcher_pair() as (dispatcher, far):
        failures: list[int] = []
        with in_thread(lambda: echo(far, n_threads * n_each)):
            threads = [threading.Thread(target=ask, args=(1000 * i, failures)) for i in range(n_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
                assert not thread.is_alive()
        assert not failures
        assert dispatcher.stats().in_flight == 0


def test_a_question_that_is_not_written_yet_is_waited_for_without_reading() -> None:
    with dispatcher_pair() as (dispatcher, far):
        make_rest(dispatcher, far)
        gate: Future[object] = Future()
        answers: list[Any] = []
        thread = waiting(dispatcher.ask(ReadRegion(0, 8), gate=gate), answers)
        assert far.has_nothing()
        assert not reads(dispatcher)
        gate.set_result(SKIP)
        thread.join(WAIT_S)
        assert answers == [None]


def test_two_large_transfers_in_opposite_directions_while_one_waits() -> None:
    size = 16 * MIB
    out = memoryview(bytes(range(256)) * (size // 256))
    tensor = region(1, 0, size)

    def far_side() -> None:
        assert far.request() == ReadRegion(0, size)
        far.answer(bytes(size))
        assert far.request() == SetTensor(tensor, 0, 0)
        assert far.payload() == out

    with dispatcher_pair() as (dispatcher, far):
        make_rest(dispatcher, far)
        read = dispatcher.ask(ReadRegion(0, size))
        sent: Future[None] = Future()
        dispatcher.tell(SetTensor(tensor, 0, 0), out, sent=sent)
        with in_thread(far_side):
            assert len(read.result()) == size
            sent.result(WAIT_S)


def test_a_waiter_hears_of_the_loss() -> None:
    with dispatcher_pair() as (dispatcher, far):
        make_rest(dispatcher, far)
        asked = dispatcher.ask(Ping(1))
        with in_thread(lambda: (wait_until(lambda: reads(dispatcher)), far.sock.close())):
            with pytest.raises(DeviceLost, match="during PING: the worker closed the connection|reset by peer"):
                asked.result()


@pytest.mark.parametrize("rested", [False, True])
def test_closing_while_another_thread_waits(rested: bool) -> None:
    with dispatcher_pair() as (dispatcher, far):
        if rested:
            make_rest(dispatcher, far)
        answers: list[Any] = []
        thread = waiting(dispatcher.ask(Ping(1)), answers)
        wait_until(lambda: reads(dispatcher))
        dispatcher.close()
        thread.join(WAIT_S)
        assert isinstance(answers[0], DeviceLost)
        assert not reads(dispatcher)


@pytest.mark.parametrize("waits", [False, True])
def test_closing_from_the_callback_of_an_answer(waits: bool) -> None:
    with dispatcher_pair() as (dispatcher, far):
        asked = dispatcher.ask(Ping(1))
        closed = threading.Event()
        asked.add_done_callback(lambda _: (dispatcher.close(), closed.set()))
        echo(far, 1)
        if waits:
            assert asked.result() == Value(1)
        assert closed.wait(WAIT_S)


def test_a_time_limit_holds() -> None:
    with dispatcher_pair() as (dispatcher, far):
        make_rest(dispatcher, far)
        asked = dispatcher.ask(Ping(1))
        with pytest.raises(TimeoutError):
            asked.result(0.01)
        echo(far, 1)
        assert asked.result(WAIT_S) == Value(1)
        assert asked.exception() is None
