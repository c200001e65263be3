"""What one client has given to a worker's devices and nobody has seen to be done yet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from app.engine.device import Device
from app.rpc.graphs import Graph
from app.rpc.holdings import Spot
from app.rpc.station import Station

#: As much may be queued on a device unseen; then the session waits, and with it the client.
MAX_UNSEEN_CALLS, MAX_UNSEEN_BYTES = 512, 64 << 20


class Workload:
    """Used by the session's thread alone. `check` raises once nothing may be done any more."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        #: Devices that were given work since they were last seen to be done with all of it.
        self._busy: set[Station] = set()
        self._unseen_calls = self._unseen_bytes = 0
        #: The end of the last run on each device.
        self._runs: dict[Station, Future[None]] = {}
        #: Bulk bytes written since the last run: whether the next one belongs to a prompt.
        self.bulk_bytes = 0

    def device(self, station: Station, n_bytes: int = 0) -> Device:
        """The device, which is about to be given something to do, with `n_bytes` of ours to keep until it is done."""
        self._unseen_calls += 1
        self._unseen_bytes += n_bytes
        if self._unseen_calls > MAX_UNSEEN_CALLS or self._unseen_bytes > MAX_UNSEEN_BYTES:
            for busy in tuple(self._busy):
                self.wait(busy)
        self._busy.add(station)
        return station.device

    def run(self, graph: Graph) -> Future[None]:
        """Have a graph computed; in this thread if its device is idle and the next input is not on its way yet."""
        self.device(graph.station)
        ended = graph.station.run(graph.handle, at_once=self.bulk_bytes == 0)
        self.bulk_bytes = 0
        self._runs[graph.station] = ended
        return ended

    def is_computing(self, station: Station) -> bool:
        """Whether a graph of this client runs, or is about to: then nothing is waited for that waits for it."""
        run = self._runs.get(station)
        return run is not None and not run.done()

    def may_block(self, station: Station) -> bool:
        """Whether this thread may wait for what it asks of a device: nothing else is there to be done meanwhile."""
        return self.bulk_bytes == 0 and not self.is_computing(station)

    def is_busy(self, station: Station) -> bool:
        return station in self._busy

    def wait(self, station: Station) -> None:
        """Wait until a device is done with all that it was given. Raises what went wrong."""
        station.device.record().result()
        self.seen(station)
        self._check()

    def seen(self, station: Station) -> None:
        """A device was seen to be done with all that it was given."""
        self._busy.discard(station)
        if not self._busy:
            self._unseen_calls = self._unseen_bytes = 0

    def host_view(self, spot: Spot, size: int) -> memoryview | None:
        """The range itself, once the device is done with all it was given; None where it cannot be had."""
        view = spot.station.device.host_view(spot.buffer, spot.offset, size)
        if view is not None:
            self.seen(spot.station)
            self._check()
        return view
