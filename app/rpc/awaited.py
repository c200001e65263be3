"""The future of an answer, whose waiter helps to bring it about."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Awaited(Future[T]):
    """A thread that waits without a time limit calls `read_for` first, once the question is on the wire.

    `read_for` reads the connection until this future is done, or returns at once when another thread reads already.
    """

    def __init__(self, read_for: Callable[[Future[Any]], None]) -> None:
        super().__init__()
        self._read_for = read_for
        #: Whether the question has been written, so that the connection is where the answer will come from.
        self.on_wire = False

    def result(self, timeout: float | None = None) -> T:
        if timeout is None and self.on_wire and not self.done():
            self._read_for(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout is None and self.on_wire and not self.done():
            self._read_for(self)
        return super().exception(timeout)
