"""How a boundary gets from the stage that computed it to the stage that goes on with it.

| way      | when                                   | its bytes travel                                              |
| -------- | -------------------------------------- | ------------------------------------------------------------- |
| relayed  | always possible                        | device to control plane, control plane to the next device     |
| pushed   | the first device has a route to the next | from device to device, once                                  |
| selected | the last device can look through rows  | to the control plane, of each row of logits the best tokens   |

Either way the next stage's lane has the boundary's place in its order already, and the engine's thread waits for none.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from app.engine.device import Device
from app.engine.program import Buffer
from app.engine.route import Departure, Route
from app.engine.rows import RowSelection


@dataclass(frozen=True, slots=True)
class Region:
    """A run of bytes on a device."""

    device: Device
    buffer: Buffer
    offset: int
    n_bytes: int


class Parcel(ABC):
    """A stage's output on its way. `left`: the stage is done with it; for the last stage the value is the bytes."""

    left: Future[Any]

    @abstractmethod
    def deliver(self, place: Region) -> Future[Any]:
        """Queue its arrival as the next stage's input. Resolves when it is there, or was handed over to be sent."""

    @property
    def proofs(self) -> Sequence[Future[Any]]:
        """What must have resolved before anything computed from this parcel may be believed."""
        return ()


class HandOver(ABC):
    """A way from one stage to the next."""

    name: ClassVar[str]

    @property
    def is_open(self) -> bool:
        return True

    @abstractmethod
    def send(self, output: Region) -> Parcel:
        """Queue the departure of a stage's output behind its run."""


class Relayed(HandOver):
    """Through the control plane, as the future that the next device's write waits for: its failure is the write's."""

    name = "relayed"

    def send(self, output: Region) -> Parcel:
        return RelayedParcel(output.device.read(output.buffer, output.offset, output.n_bytes))


class RelayedParcel(Parcel):
    def __init__(self, left: Future[Any]) -> None:
        self.left = left

    def deliver(self, place: Region) -> Future[Any]:
        return place.device.write(place.buffer, place.offset, self.left, size_bytes=place.n_bytes)


class Pushed(HandOver):
    """Straight from device to device; the control plane learns no more than that it has happened."""

    name = "pushed"

    def __init__(self, route: Route) -> None:
        self._route = route

    @property
    def is_open(self) -> bool:
        return self._route.is_open

    def send(self, output: Region) -> Parcel:
        return PushedParcel(self._route.push(output.buffer, output.offset, output.n_bytes))


class PushedParcel(Parcel):
    def __init__(self, departure: Departure) -> None:
        self._departure = departure
        self._arrived: Future[Any] | None = None
        self.left = departure.left

    def deliver(self, place: Region) -> Future[Any]:
        self._arrived = self._departure.arrive(place.buffer, place.offset)
        return self._arrived

    @property
    def proofs(self) -> Sequence[Future[Any]]:
        return (self.left,) if self._arrived is None else (self.left, self._arrived)


RELAYED = Relayed()


class Selected(HandOver):
    """To the control plane from a device that selects rows: of the last stage's output only what was wished for."""

    name = "selected"

    def __init__(self, rows: RowSelection) -> None:
        self._rows = rows

    def send(self, output: Region) -> Parcel:
        return RelayedParcel(output.device.read_rows(output.buffer, output.offset, self._rows))


def choose(source: Device, target: Device) -> HandOver:
    """The best way between two devices. May block for as long as it takes to try a route."""
    route = source.open_route(target)
    return RELAYED if route is None else Pushed(route)


@dataclass(frozen=True, slots=True)
class _Boundary:
    source: Device
    target: Device
    way: HandOver


class Boundaries:
    """The ways between the devices of consecutive stages."""

    def __init__(self) -> None:
        self._boundaries: list[_Boundary] = []

    def connect(self, devices: Sequence[Device]) -> None:
        """Choose a way for each boundary anew, except where the one there is leads between the same devices still."""
        known = self._boundaries
        self._boundaries = []
        for number, (source, target) in enumerate(zip(devices, devices[1:], strict=False)):
            old = known[number] if number < len(known) else None
            keeps = old is not None and self._leads(old, source, target) and isinstance(old.way, Pushed)
            self._boundaries.append(old if old and keeps else _Boundary(source, target, choose(source, target)))

    def way(self, number: int, devices: Sequence[Device]) -> HandOver:
        """The way out of a stage. While none was chosen for these devices, and behind the last, it is the relay."""
        if number >= len(self._boundaries) or number + 1 >= len(devices):
            return RELAYED
        boundary = self._boundaries[number]
        return boundary.way if self._leads(boundary, devices[number], devices[number + 1]) else RELAYED

    @staticmethod
    def _leads(boundary: _Boundary, source: Device, target: Device) -> bool:
        return boundary.source is source and boundary.target is target and boundary.way.is_open


def when_all(result: Future[Any], proofs: Sequence[Future[Any]]) -> Future[Any]:
    """Resolves to the value of `result` once all proofs have resolved too; fails at once with whatever fails first."""
    if not proofs:
        return result
    whole: Future[Any] = Future()
    waiting = _Countdown(len(proofs) + 1)

    def resolved(one: Future[Any]) -> None:
        error = one.exception()
        if waiting.is_settled_by(one_failed=error is not None):
            if error is not None:
                whole.set_exception(error)
            else:
                whole.set_result(result.result())

    whole.set_running_or_notify_cancel()
    for future in (result, *proofs):
        future.add_done_callback(resolved)
    return whole


class _Countdown:
    """Counts events of any threads; says once that the last has come, or the first failure."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._lock = threading.Lock()

    def is_settled_by(self, *, one_failed: bool) -> bool:
        with self._lock:
            if self._left <= 0:
                return False
            self._left = 0 if one_failed else self._left - 1
            return self._left == 0
