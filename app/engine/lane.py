"""One ordered lane: a thread that does submitted jobs strictly in order.

Local devices stand on it. A job may wait for a future's value before it runs; everything behind it waits as well.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from app.errors import DeviceLost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    future: Future[Any] | None
    surfaces: bool  # whether this job reports an earlier job's error


def _nothing() -> None:
    """The job of a mark."""


_DONE: Future[None] = Future()
_DONE.set_result(None)


class Lane:
    """Runs jobs in order on a thread of its own.

    An exception of a job goes to its future if it has one, and is kept and raised by the next job submitted with
    `surfaces=True` (reads and events), once. Jobs submitted after `close` raise `DeviceLost`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._busy = False  # whether a job is being done, here or in a caller's thread
        self._callers_may_block = False
        self._awaited: threading.Event | None = None  # set when the future that a job waits for is done
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def allow_blocking(self, allowed: bool = True) -> None:
        """Whether from now on a job that finds the lane idle is done in the thread that submits it.

        For callers who wait anyway, such as the sessions of a worker: it saves two changes of thread per job.
        """
        self._callers_may_block = allowed

    def submit(self, work: Callable[[], Any]) -> None:
        """Queue a job nobody waits for; its error surfaces at the next read or event."""
        self._put(_Job(work, None, False))

    def call(self, work: Callable[[], Any], *, surfaces: bool = False) -> Future[Any]:
        """Queue a job and return the future of its result."""
        future: Future[Any] = Future()
        self._put(_Job(work, future, surfaces))
        return future

    def do(self, work: Callable[[], T]) -> T:
        """Queue a job and wait for its result, without a future where it is done in the caller's thread."""
        if not self._seize():
            result: T = self.call(work).result()
            return result
        try:
            return work()
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._release()

    def do_if_idle(self, work: Callable[[], T], otherwise: T) -> T:
        """Do a job now if nothing is before it and nothing has failed; else `otherwise`, and nothing is done.

        What it raises is told to the caller alone.
        """
        with self._wake:
            self._check_open()
            if not self._is_idle() or self._error is not None:
                return otherwise
            self._busy = True
        try:
            return work()
        finally:
            self._release()

    def mark(self) -> Future[None]:
        """Resolves when everything queued before is done; reports an earlier job's error."""
        with self._wake:
            self._check_open()
            if self._callers_may_block and self._is_idle() and self._error is None:
                return _DONE
        return self.call(_nothing, surfaces=True)

    def wait_for(self, future: Future[T]) -> T:
        """Only for use inside a job: the result of a future, for which this job and all behind it wait.

        Raises what the future raises, and DeviceLost if the lane is closed before the future is done.
        """
        done = threading.Event()
        with self._wake:
            self._awaited = done
            if self._closed:
                done.set()
        future.add_done_callback(lambda _: done.set())
        done.wait()
        if not future.done():
            raise DeviceLost(self.name, "the device was closed while it waited for bytes to write")
        return future.result()

    def close(self) -> None:
        """Finish what is queued, then stop; nothing is waited for any more. May be called twice and from a callback."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            if self._awaited is not None:
                self._awaited.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, job: _Job) -> None:
        if self._seize(job):
            self._do(job)
            self._release()

    def _seize(self, otherwise: _Job | None = None) -> bool:
        """Whether the caller does a job itself, now; if not, `otherwise` is queued."""
        with self._wake:
            self._check_open()
            at_once = self._callers_may_block and self._is_idle()
            if at_once:
                self._busy = True
            elif otherwise is not None:
                self._jobs.append(otherwise)
                self._wake.notify()
        return at_once

    def _release(self) -> None:
        with self._wake:
            self._busy = False
            if self._jobs or self._closed:
                self._wake.notify()

    def _is_idle(self) -> bool:
        """Whether there is nothing before a new job. The lock is held."""
        return not self._busy and not self._jobs

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceLost(self.name, "the device was closed")

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._busy or not (self._jobs or self._closed):
                    self._wake.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            self._do(job)
            with self._wake:
                self._busy = False

    def _do(self, job: _Job) -> None:
        if job.future is not None and not job.future.set_running_or_notify_cancel():
            return
        try:
            if job.surfaces and self._error is not None:
                error, self._error = self._error, None
                raise error
            result = job.work()
        except BaseException as error:  # a lane never dies: the error travels to whoever waits
            if not job.surfaces:
                self._error = self._error or error
            if job.future is not None:
                job.future.set_exception(error)
        else:
            if job.future is not None:
                job.future.set_result(result)
