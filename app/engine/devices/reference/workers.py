"""A few threads that share the tiles of one op. numpy releases the GIL in all that takes time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

T = TypeVar("T")


@cache
def one_blas_thread() -> None:
    """Keep BLAS, for the whole process, on the thread that calls it.

    Its own threads spin while they wait for each other: on a machine with anything else to do, that costs a factor of
    ten, and a device of one thread would not be one.
    """
    ThreadpoolController().limit(limits=1, user_api="blas")


class Workers:
    """Runs tasks on `n_threads` threads, the caller's being one of them; which one takes a task is left to chance.

    Results may not depend on who computed them: a task writes its own part of the result and nothing else.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        if n_threads < 1:
            raise ValueError(f"a device computes on one thread or more, got {n_threads}")
        one_blas_thread()
        self.n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads - 1, f"{name}-worker") if n_threads > 1 else None
        self._local = threading.local()

    def for_each(self, tasks: Sequence[T], work: Callable[[T], None]) -> None:
        """Do `work` for every task; returns when all are done. The first error is raised."""
        if self._pool is None or len(tasks) < 2:
            for task in tasks:
                work(task)
            return
        queue = iter(tasks)

        def drain() -> None:
            with np.errstate(all="ignore"):
                for task in queue:
                    work(task)

        helpers = [self._pool.submit(drain) for _ in range(min(self.n_threads, len(tasks)) - 1)]
        try:
            drain()
        finally:
            for helper in helpers:  # a helper's error goes first if this thread had none
                helper.result()

    def scratch(self, n_floats: int) -> NDArray[np.float32]:
        """Float32 memory of the calling thread, contents undefined, valid until its next call."""
        memory: NDArray[np.float32] | None = getattr(self._local, "scratch", None)
        if memory is None or memory.size < n_floats:
            memory = self._local.scratch = np.empty(n_floats, np.float32)
        return memory[:n_floats]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
