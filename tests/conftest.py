"""A check that no test module leaves threads or sockets behind.

It compares before and after a module, so fixtures that own threads or sockets must be module-scoped or narrower.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

#: How long something that was asked to stop may take to be gone.
GRACE_S = 5.0


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _sockets() -> set[str]:
    """The kernel's names of this process's open sockets, such as `socket:[12345]`; empty without /proc."""
    targets = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            targets.add(os.readlink(entry))
        except OSError:  # closed while we looked
            continue
    return {target for target in targets if target.startswith("socket:")}


def _left_over(now: Callable[[], set[T]], before: set[T]) -> set[T]:
    """What is there and was not before, once the grace period is over."""
    end = time.monotonic() + GRACE_S
    while left := now() - before:
        if time.monotonic() > end:
            return left
        gc.collect()
        time.sleep(0.01)
    return set()


@pytest.fixture(scope="module", autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    threads, sockets = _threads(), _sockets()
    yield
    if left := _left_over(_threads, threads):
        pytest.fail(f"{request.node.name} left threads behind: {sorted(thread.name for thread in left)}")
    if left_sockets := _left_over(_sockets, sockets):
        pytest.fail(f"{request.node.name} left {len(left_sockets)} sockets open")
