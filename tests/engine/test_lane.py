"""Lanes: strict order, waiting for futures in place, errors that surface once, and a close that finishes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from app.engine.lane import Lane
from app.errors import DeviceLost


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("test")
    yield lane
    lane.close()


def fail() -> None:
    raise ValueError("broken")


def test_jobs_run_in_order_and_wait_behind_a_future(lane: Lane) -> None:
    gate: Future[int] = Future()
    seen: list[int] = []
    lane.submit(lambda: seen.append(gate.result(10)))
    lane.submit(lambda: seen.append(2))
    last = lane.call(lambda: seen.append(3), surfaces=True)
    assert not last.done() and seen == []
    gate.set_result(1)
    last.result(10)
    assert seen == [1, 2, 3]


def test_an_error_nobody_waits_for_surfaces_once_at_the_next_read(lane: Lane) -> None:
    lane.submit(fail)
    assert lane.call(lambda: 5).result(10) == 5
    with pytest.raises(ValueError, match="broken"):
        lane.call(lambda: 6, surfaces=True).result(10)
    assert lane.call(lambda: 7, surfaces=True).result(10) == 7


def test_an_error_of_a_call_reaches_its_future_and_the_next_read(lane: Lane) -> None:
    with pytest.raises(ValueError, match="broken"):
        lane.call(fail).result(10)
    with pytest.raises(ValueError, match="broken"):
        lane.call(lambda: 6, surfaces=True).result(10)


def test_the_first_of_several_errors_surfaces(lane: Lane) -> None:
    lane.submit(fail)
    lane.submit(lambda: 1 // 0)
    with pytest.raises(ValueError, match="broken"):
        lane.call(lambda: None, surfaces=True).result(10)


def test_a_cancelled_call_is_skipped_in_its_place(lane: Lane) -> None:
    gate: Future[None] = Future()
    seen: list[str] = []
    lane.submit(gate.result)
    cancelled = lane.call(lambda: seen.append("cancelled"))
    assert cancelled.cancel()
    last = lane.call(lambda: seen.append("last"))
    gate.set_result(None)
    last.result(10)
    assert seen == ["last"]


def test_close_finishes_what_is_queued_and_refuses_the_rest() -> None:
    lane = Lane("closing")
    seen: list[int] = []
    for number in range(100):
        lane.submit(lambda n=number: seen.append(n))  # type: ignore[misc]
    lane.close()
    lane.close()
    assert seen == list(range(100))
    with pytest.raises(DeviceLost, match="closing.*closed"):
        lane.submit(lambda: None)


def test_a_caller_that_may_block_does_the_job_itself_when_the_lane_is_idle(lane: Lane) -> None:
    lane.allow_blocking()
    assert lane.call(threading.get_ident).result(0) == threading.get_ident()
    lane.submit(fail)
    with pytest.raises(ValueError, match="broken"):
        lane.call(lambda: 6, surfaces=True).result(0)


def test_a_caller_that_may_not_block_any_more_hands_over(lane: Lane) -> None:
    lane.allow_blocking()
    lane.allow_blocking(False)
    assert lane.call(threading.get_ident).result(10) != threading.get_ident()


def test_a_caller_that_may_block_does_not_overtake(lane: Lane) -> None:
    gate: Future[int] = Future()
    seen: list[int] = []
    lane.submit(lambda: seen.append(gate.result(10)))
    lane.allow_blocking()
    behind = lane.call(lambda: seen.append(2))
    assert not behind.done()
    gate.set_result(1)
    behind.result(10)
    assert seen == [1, 2]


def test_callers_that_may_block_take_turns(lane: Lane) -> None:
    lane.allow_blocking()
    running, overlaps, ran = [0], [], [0]

    def job() -> None:
        running[0] += 1
        overlaps.append(running[0] > 1)
        ran[0] += 1
        running[0] -= 1

    def submit() -> None:
        for _ in range(200):
            lane.submit(job)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lane.call(lambda: None).result(10)
    assert ran == [800] and not any(overlaps)


@pytest.mark.parametrize("may_block", [False, True])
def test_a_job_whose_result_is_waited_for_keeps_its_place_and_leaves_its_error(lane: Lane, may_block: bool) -> None:
    lane.allow_blocking(may_block)
    seen: list[int] = []
    lane.submit(lambda: seen.append(1))
    assert lane.do(lambda: [*seen, 2]) == [1, 2]
    with pytest.raises(ValueError, match="broken"):
        lane.do(fail)
    with pytest.raises(ValueError, match="broken"):
        lane.mark().result(10)
    assert lane.mark().result(10) is None


def test_a_mark_waits_for_what_another_thread_does(lane: Lane) -> None:
    gate: Future[None] = Future()
    lane.submit(lambda: gate.result(10))
    lane.allow_blocking()
    mark = lane.mark()
    assert not mark.done()
    gate.set_result(None)
    mark.result(10)
    assert lane.mark().done()


@pytest.mark.parametrize("may_block", [False, True])
def test_a_closed_lane_takes_no_marks(may_block: bool) -> None:
    lane = Lane("closed")
    lane.allow_blocking(may_block)
    lane.close()
    with pytest.raises(DeviceLost, match="closed"):
        lane.mark()
    with pytest.raises(DeviceLost, match="closed"):
        lane.do(lambda: 1)


def test_a_job_for_an_idle_lane_is_refused_by_one_that_is_busy_or_has_failed() -> None:
    lane = Lane("test")
    assert lane.do_if_idle(lambda: 1, 0) == 1
    with pytest.raises(ZeroDivisionError):
        lane.do_if_idle(lambda: 1 // 0, 0)
    lane.mark().result(5)  # told to its caller alone
    gate, runs = threading.Event(), threading.Event()
    lane.submit(lambda: (runs.set(), gate.wait(5)))
    assert runs.wait(5) and lane.do_if_idle(lambda: 1, 0) == 0
    gate.set()
    lane.mark().result(5)
    failed = lane.call(lambda: 1 // 0)
    assert failed.exception(5) is not None and lane.do_if_idle(lambda: 1, 0) == 0
    with pytest.raises(ZeroDivisionError):
        lane.mark().result(5)
    lane.close()
