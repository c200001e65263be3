"""The threads of one device: every task once, errors come back, scratch is each thread's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from app.engine.devices.reference.workers import Workers


@pytest.fixture(params=[1, 2, 4])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.param, "test")
    yield made
    made.close()


@pytest.mark.parametrize("n_tasks", [0, 1, 2, 100])
def test_every_task_is_done_once(workers: Workers, n_tasks: int) -> None:
    done = [0] * n_tasks

    def work(task: int) -> None:
        done[task] += 1

    workers.for_each(range(n_tasks), work)
    assert done == [1] * n_tasks


def test_tasks_run_side_by_side() -> None:
    """Two tasks that wait for each other can only end on two threads."""
    workers = Workers(2, "test")
    meeting = threading.Barrier(2, timeout=20)
    workers.for_each(range(2), lambda _: meeting.wait() and None)
    workers.close()


def test_an_error_comes_back_and_the_workers_go_on(workers: Workers) -> None:
    def work(task: int) -> None:
        if task == 3:
            raise KeyError("task 3")

    with pytest.raises(KeyError, match="task 3"):
        workers.for_each(range(8), work)
    done: list[int] = []
    workers.for_each(range(8), done.append)
    assert sorted(done) == list(range(8))


def test_warnings_of_numbers_are_silent_on_every_thread(workers: Workers) -> None:
    def divide(_: int) -> None:
        np.float32(1) / np.zeros(4, np.float32)

    with np.errstate(all="ignore"):
        workers.for_each(range(16), divide)


def test_scratch_is_kept_and_grows(workers: Workers) -> None:
    first = workers.scratch(100)
    assert workers.scratch(50).ctypes.data == first.ctypes.data
    assert workers.scratch(1000).size == 1000
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(workers.scratch(1000).ctypes.data))
    thread.start()
    thread.join()
    assert others[0] != workers.scratch(1000).ctypes.data
