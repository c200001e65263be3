"""Routes on which one device sends bytes to another without leading them through this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from app.engine.program import Buffer


class Departure(ABC):
    """Bytes that a device was told to push. They must be taken by the device at the other end, once, in lane order.

    `left` resolves when the sender has read and sent them, and fails when it could not.
    """

    left: Future[Any]

    @abstractmethod
    def arrive(self, target: Buffer, offset: int) -> Future[float]:
        """Have the receiver put them here, in its own lane; what it is given later waits for them.

        Resolves when they are there, to the seconds since when they have been. A failure is told by this future alone:
        the lane goes on with whatever bytes it has, so who reads what was computed from them must look here too.
        """


class Route(ABC):
    """Leads from one device to another. Calls never block; bytes arrive in the order in which they were pushed."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """False once anything on it has failed; then it stays so."""

    @abstractmethod
    def push(self, source: Buffer, offset: int, size_bytes: int) -> Departure:
        """Have the sender send a region when everything submitted to it before is done."""
