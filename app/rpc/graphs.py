"""The prepared graphs of one client: the last one per device, those kept by id, and those seen before."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from app.engine.device import Handle
from app.engine.program import Buffer
from app.errors import RemoteProtocolError
from app.rpc.holdings import Holdings
from app.rpc.lower import decode_graph, flags_nodes
from app.rpc.station import Station

#: Graphs kept per client, so that one sent again byte by byte needs no second look.
MAX_SEEN = 64

#: Graphs one client may keep by id; a client of ours has a few per shape bucket.
MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Graph:
    """A prepared program, and the buffers that must live for it."""

    station: Station
    handle: Handle
    buffers: frozenset[Buffer]
    #: What `turns` has planned with it.
    turns: dict[object, Any] = field(default_factory=dict, compare=False)

    def release(self) -> None:
        self.station.device.release(self.handle)


class Graphs:
    """What a client has sent, checked and prepared."""

    def __init__(self, holdings: Holdings, client: str) -> None:
        self._holdings = holdings
        self._client = client
        #: Clients older than the COMPUTE flag never set it and mean every node; others want unmarked ones skipped.
        self._knows_flags = False
        self._stored: dict[int, Graph] = {}
        self._seen: OrderedDict[tuple[int, bytes], Graph] = OrderedDict()
        self._kept: dict[tuple[int, int], Graph] = {}

    def compute(self, device: int, body: memoryview) -> Graph:
        """The graph of a GRAPH_COMPUTE, which is the device's last one from now on."""
        key = (device, bytes(body))
        graph = self._seen.get(key)
        if graph is None:
            graph = self._seen[key] = self._prepare(device, body)
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)[1].release()
        else:
            self._seen.move_to_end(key)
        self._stored[device] = graph
        return graph

    def last(self, device: int) -> Graph:
        """The graph of a GRAPH_RECOMPUTE. Raises RemoteProtocolError when there is none."""
        self._holdings.station(device)
        graph = self._stored.get(device)
        if graph is None:
            raise RemoteProtocolError(f"GRAPH_RECOMPUTE, but no graph is stored for device {device}")
        return graph

    def keep(self, device: int, graph_id: int, body: memoryview) -> None:
        """Prepare a graph and keep it by its id. Raises DeviceError when it cannot run."""
        if len(self._kept) >= MAX_KEPT:
            raise RemoteProtocolError(f"more than {MAX_KEPT} graphs are kept")
        graph = self._prepare(device, body)
        self.drop(device, graph_id)
        self._kept[device, graph_id] = graph

    def kept(self, device: int, graph_id: int) -> Graph:
        graph = self._kept.get((device, graph_id))
        if graph is None:
            raise RemoteProtocolError(f"graph {graph_id} of device {device} is not kept here")
        return graph

    def drop(self, device: int, graph_id: int) -> None:
        """Not an error for a graph that is gone: a FREE may have taken it."""
        graph = self._kept.pop((device, graph_id), None)
        if graph is not None:
            graph.release()

    def forget(self, buffer: Buffer) -> None:
        """A buffer goes away. As in a stock worker no stored graph survives; kept ones do if they do not use it."""
        self._stored.clear()
        while self._seen:
            self._seen.popitem()[1].release()
        for device, graph_id in [key for key, graph in self._kept.items() if buffer in graph.buffers]:
            self.drop(device, graph_id)

    def forget_all(self) -> None:
        self._stored.clear()
        for graph in (*self._seen.values(), *self._kept.values()):
            graph.release()
        self._seen.clear()
        self._kept.clear()

    def _prepare(self, device: int, body: memoryview) -> Graph:
        station = self._holdings.station(device)
        self._knows_flags = self._knows_flags or flags_nodes(body)
        name = f"{self._client} on device {device}"
        program = decode_graph(body, self._holdings.buffers, device, name, all_run=not self._knows_flags)
        handle = station.device.prepare(program)
        buffers = frozenset(tensor.buffer for tensor in program.tensors if tensor.buffer is not None)
        return Graph(station, handle, buffers)
