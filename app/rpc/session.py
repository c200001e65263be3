"""One client of a worker: its private buffers and graphs, and what it asks, one request after the other.

Nothing a client says is believed before it is checked; a violation ends this session and no other. Requests are parsed
by `protocol`, tensors and graphs by `lower`; here they meet the devices.
"""

from __future__ import annotations

import bisect
import json
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.engine.device import Handle
from app.engine.ggml import Op, TensorFlag
from app.engine.program import Buffer, PlacedTensor
from app.errors import DeviceError, ProtocolError, RemoteProtocolError, TandemError
from app.rpc import messages as m
from app.rpc.lower import OPS, Mapped, checked_type, decode_graph, locate_tensor
from app.rpc.protocol import RequestParser, encode_answer, encode_error_notice
from app.rpc.sockets import receive_tick, set_ticks
from app.rpc.station import Station
from app.rpc.transfers import BATCH_ITEM
from app.rpc.wire import ANSWER_HEADER, FIRST_EXTENSION, TANDEM_PAD, Command, RpcTensor

if TYPE_CHECKING:
    from app.rpc.worker import Worker

log = logging.getLogger(__name__)

#: Bulk data goes from the socket to a device, and back, in pieces of this size; one moves while the next arrives.
PIECE_BYTES = 1 << 20

#: Graphs kept per client, so that one sent again byte by byte needs no second look.
MAX_GRAPHS = 64

#: Checked byte ranges kept per client: the same few repeat with every token.
MAX_SPOTS = 4096


@dataclass(frozen=True, slots=True)
class Graph:
    """A prepared program, and the buffers that must live for it."""

    station: Station
    handle: Handle
    buffers: frozenset[Buffer]


@dataclass(frozen=True, slots=True)
class Spot:
    """A checked byte range of one of this client's buffers."""

    station: Station
    buffer: Buffer
    offset: int


class Session:
    """Serves one connected socket until the client leaves, breaks the rules, or stays silent within a request."""

    def __init__(self, worker: Worker, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._worker = worker
        self._sock = sock
        self._parser = RequestParser(worker.settings.version, worker.settings.max_message_bytes)
        self._buffers: dict[int, Mapped] = {}
        self._bases: list[tuple[int, int]] = []  # (base, remote_ptr), sorted
        self._spots: dict[object, Spot] = {}
        self._stored: dict[int, Graph] = {}
        self._seen: OrderedDict[tuple[int, bytes], Graph] = OrderedDict()
        self._by_id: dict[tuple[int, int], Graph] = {}
        self._understands_notices = False
        self._greeted = False
        self._failure: str | None = None

    def run(self) -> None:
        """Serve until the end, then free everything the client had."""
        reason: str | None = None
        try:
            set_ticks(self._sock)
            self._serve()
        except (TandemError, MemoryError) as error:
            reason = self._failure or str(error) or type(error).__name__
        except (EOFError, OSError) as error:
            reason = self._failure
            log.debug("client %s left: %s", self.peer, error)
        except Exception:
            log.exception("a bug in this worker ended the session of client %s", self.peer)
        finally:
            if reason is not None:
                log.warning("closed client %s: %s", self.peer, reason)
                self._say_why(reason)
            self._free_everything()
            self._sock.close()

    def stop(self, reason: str | None = None) -> None:
        """Hang up from another thread."""
        if reason is not None and self._failure is None:
            self._failure = reason
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the client was faster
            pass

    # -- the wire -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        parser = self._parser
        while True:
            request = parser.next_request()
            if request is None:
                self._receive(parser.space(), parser.received)
                continue
            if request.command >= FIRST_EXTENSION:
                self._understands_notices = True
            _HANDLERS[request.command](self, request)

    def _receive(self, space: memoryview, done: Callable[[int], None]) -> None:
        """Receive something. Raises EOFError when the client has gone or stays silent for too long."""
        waits_since = time.monotonic()
        settings = self._worker.settings
        while (n := receive_tick(self._sock, space)) is None:
            silent_s = time.monotonic() - waits_since
            if not self._greeted and silent_s > settings.hello_s:
                raise RemoteProtocolError(f"no HELLO within {settings.hello_s:g} s")
            if self._parser.mid_request and silent_s > settings.idle_s:
                raise RemoteProtocolError(f"silence for {settings.idle_s:g} s in the middle of a request")
        if n == 0:
            raise EOFError("end of stream")
        done(n)

    def _send(self, *buffers: bytes | memoryview) -> None:
        """Send a whole answer, however slowly the client takes it."""
        left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        moved_at = time.monotonic()
        while left:
            try:
                n = self._sock.sendmsg(left)
            except BlockingIOError:
                if time.monotonic() - moved_at > self._worker.settings.idle_s:
                    raise RemoteProtocolError("the client does not take its answer") from None
                continue
            moved_at = time.monotonic()
            while left and n >= len(left[0]):
                n -= len(left.pop(0))
            if n:
                left[0] = left[0][n:]

    def _answer(self, command: Command, answer: Any) -> None:
        layout = m.SPECS[self._worker.settings.version][command].answer
        assert layout is not None
        self._send(encode_answer(layout, answer))

    def _say_why(self, reason: str) -> None:
        """Last words to a client that understands them; it has a moment to read them before the connection closes."""
        if not self._understands_notices:
            return
        try:
            self._sock.sendall(encode_error_notice(reason))
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(1.0)
            for _ in range(256):
                if not self._sock.recv(1 << 16):
                    break
        except OSError as error:
            log.debug("client %s did not wait for the reason: %s", self.peer, error)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _station(self, device: int) -> Station:
        stations = self._worker.stations
        if device >= len(stations):
            raise RemoteProtocolError(f"device {device} does not exist, this worker has {len(stations)}")
        return stations[device]

    def _mapped(self, remote_ptr: int) -> Mapped:
        mapped = self._buffers.get(remote_ptr)
        if mapped is None:
            raise RemoteProtocolError(f"buffer {remote_ptr:#x} is not one of this client's")
        return mapped

    def _range(self, tensor: RpcTensor, offset: int, size: int) -> Spot:
        """A byte range inside a tensor inside a buffer of this client."""
        key = (tensor, offset, size)
        spot = self._spots.get(key)
        if spot is None:
            mapped, start, n_bytes = locate_tensor(tensor, self._buffers)
            if offset + size > n_bytes:
                raise RemoteProtocolError(f"{size} bytes at offset {offset} do not lie inside a tensor of {n_bytes}")
            spot = self._remember(key, Spot(self._station(mapped.device), mapped.buffer, start + offset))
        return spot

    def _address(self, address: int, size: int) -> Spot:
        """A byte range at an absolute address."""
        key = (address, size)
        spot = self._spots.get(key)
        if spot is None:
            at = bisect.bisect_right(self._bases, (address, 1 << 64)) - 1
            mapped = self._buffers[self._bases[at][1]] if at >= 0 else None
            if mapped is None or address + size > mapped.base + mapped.buffer.size_bytes:
                raise RemoteProtocolError(f"{size} bytes at address {address:#x} lie in no buffer of this client")
            spot = self._remember(key, Spot(self._station(mapped.device), mapped.buffer, address - mapped.base))
        return spot

    def _remember(self, key: object, spot: Spot) -> Spot:
        if len(self._spots) >= MAX_SPOTS:
            self._spots.clear()
        self._spots[key] = spot
        return spot

    # -- the protocol's own ---------------------------------------------------------------------------------------

    def _hello(self, request: m.Hello) -> None:
        major, minor = self._worker.settings.version
        self._greeted = True
        self._answer(request.command, m.HelloAnswer(major, minor, 0, TANDEM_PAD))

    def _device_count(self, request: m.DeviceCount) -> None:
        self._answer(request.command, m.Value(len(self._worker.stations)))

    def _get_alignment(self, request: m.GetAlignment) -> None:
        """The cheapest answer is also the client's event: it proves that everything before it is done."""
        station = self._station(request.device)
        station.device.record().result()
        self._answer(request.command, m.Value(station.device.caps.alignment_bytes))

    def _get_max_size(self, request: m.GetMaxSize) -> None:
        self._answer(request.command, m.Value(self._station(request.device).device.caps.max_buffer_bytes))

    def _get_device_memory(self, request: m.GetDeviceMemory) -> None:
        memory = self._station(request.device).memory()
        self._answer(request.command, m.MemoryAnswer(memory.free_bytes, memory.total_bytes))

    def _get_alloc_size(self, request: m.GetAllocSize) -> None:
        device = self._station(request.device).device
        sources = tuple(_unplaced(source) for source in request.sources if source.id)
        self._answer(request.command, m.Value(device.alloc_bytes(_unplaced(request.tensor), sources)))

    # -- buffers --------------------------------------------------------------------------------------------------

    def _alloc_buffer(self, request: m.AllocBuffer) -> None:
        station = self._station(request.device)
        buffer = station.alloc(request.size_bytes)
        if buffer is None:
            log.info(
                "client %s asked for %d bytes on device %d: refused", self.peer, request.size_bytes, request.device
            )
            self._answer(request.command, m.Allocated(0, 0))
            return
        remote_ptr, base = self._worker.new_address(request.size_bytes)
        self._buffers[remote_ptr] = Mapped(buffer, base, request.device)
        bisect.insort(self._bases, (base, remote_ptr))
        self._answer(request.command, m.Allocated(remote_ptr, request.size_bytes))

    def _buffer_get_base(self, request: m.BufferGetBase) -> None:
        self._answer(request.command, m.Value(self._mapped(request.remote_ptr).base))

    def _free_buffer(self, request: m.FreeBuffer) -> None:
        """A stored graph might use what is freed, so none survives, as in a stock worker; kept ones do if they can."""
        mapped = self._mapped(request.remote_ptr)
        del self._buffers[request.remote_ptr]
        self._bases.remove((mapped.base, request.remote_ptr))
        self._spots.clear()
        self._stored.clear()
        while self._seen:
            self._release(self._seen.popitem()[1])
        for key in [key for key, graph in self._by_id.items() if mapped.buffer in graph.buffers]:
            self._release(self._by_id.pop(key))
        self._station(mapped.device).free(mapped.buffer)

    def _buffer_clear(self, request: m.BufferClear) -> None:
        mapped = self._mapped(request.remote_ptr)
        device = self._station(mapped.device).device
        device.fill(mapped.buffer, 0, mapped.buffer.size_bytes, request.value)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _set_tensor(self, request: m.SetTensor) -> None:
        size = self._parser.payload_left
        spot = self._range(request.tensor, request.offset, size)
        self._receive_payload(spot, size)

    def _receive_payload(self, spot: Spot, size: int) -> None:
        """Bulk data in pieces, each handed to the device while the next arrives; memory does not grow with `size`."""
        moving: list[tuple[Future[None], bytearray]] = []
        for start in range(0, size, PIECE_BYTES):
            n = min(PIECE_BYTES, size - start)
            if len(moving) == 2:
                done, piece = moving.pop(0)
                done.result()
            else:
                piece = bytearray(n)
            self._receive_piece(memoryview(piece)[:n])
            done = spot.station.device.write(spot.buffer, spot.offset + start, memoryview(piece)[:n])
            moving.append((done, piece))

    def _receive_piece(self, piece: memoryview) -> None:
        parser = self._parser
        while piece:
            taken = parser.take_payload(len(piece))
            if taken:
                piece[: len(taken)] = taken
                piece = piece[len(taken) :]
                continue
            before = parser.payload_left
            self._receive(piece, parser.passed)
            piece = piece[before - parser.payload_left :]

    def _set_tensor_hash(self, request: m.SetTensorHash) -> None:
        self._range(request.tensor, request.offset, 0)
        self._answer(request.command, m.Value(0))

    def _get_tensor(self, request: m.GetTensor) -> None:
        self._send_range(self._range(request.tensor, request.offset, request.size_bytes), request.size_bytes)

    def _send_range(self, spot: Spot, size: int) -> None:
        """A device's bytes as an answer: the next piece is fetched while this one is sent."""
        device = spot.station.device
        header: bytes = ANSWER_HEADER.pack(size)
        following = device.read(spot.buffer, spot.offset, min(PIECE_BYTES, size))
        for start in range(0, max(size, 1), PIECE_BYTES):
            piece = following.result()
            rest = size - start - len(piece)
            if rest > 0:
                at = spot.offset + start + len(piece)
                following = device.read(spot.buffer, at, min(PIECE_BYTES, rest))
            self._send(header, piece)
            header = b""

    def _copy_tensor(self, request: m.CopyTensor) -> None:
        """Refused with 0, so that the client moves the bytes itself, when a device cannot do it alone."""
        source, source_at, n = locate_tensor(request.source, self._buffers)
        target, target_at, room = locate_tensor(request.target, self._buffers)
        if n > room:
            raise RemoteProtocolError(f"a copy of {n} bytes into a tensor of {room} bytes")
        overlap = source.buffer is target.buffer and source_at < target_at + n and target_at < source_at + n
        done = source.device == target.device and not overlap
        if done and n:
            device = self._station(source.device).device
            device.copy(source.buffer, source_at, target.buffer, target_at, n)
        self._answer(request.command, m.Value(int(done)))

    def _memset_tensor(self, request: m.MemsetTensor) -> None:
        spot = self._range(request.tensor, request.offset, request.size_bytes)
        if request.size_bytes:
            spot.station.device.fill(spot.buffer, spot.offset, request.size_bytes, request.value)

    def _init_tensor(self, request: m.InitTensor) -> None:
        """Our devices read no padding, so there is nothing to zero; the tensor must be right all the same."""
        locate_tensor(request.tensor, self._buffers)

    # -- graphs ---------------------------------------------------------------------------------------------------

    def _graph_compute(self, request: m.GraphCompute) -> None:
        key = (request.device, bytes(request.graph))
        graph = self._seen.get(key)
        if graph is None:
            graph = self._seen[key] = self._prepare(request.device, request.graph)
            if len(self._seen) > MAX_GRAPHS:
                self._release(self._seen.popitem(last=False)[1])
        else:
            self._seen.move_to_end(key)
        self._stored[request.device] = graph
        self._run(graph)

    def _graph_recompute(self, request: m.GraphRecompute) -> None:
        self._station(request.device)
        graph = self._stored.get(request.device)
        if graph is None:
            raise RemoteProtocolError(f"GRAPH_RECOMPUTE, but no graph is stored for device {request.device}")
        self._run(graph)

    def _graph_store(self, request: m.GraphStore) -> None:
        try:
            graph = self._prepare(request.device, request.graph)
        except DeviceError as error:
            reason = str(error).encode()[: m.MAX_TEXT_ANSWER_BYTES]
            self._send(ANSWER_HEADER.pack(len(reason)), reason)
            return
        replaced = self._by_id.pop((request.device, request.graph_id), None)
        if replaced is not None:
            self._release(replaced)
        self._by_id[request.device, request.graph_id] = graph
        self._send(ANSWER_HEADER.pack(0))

    def _graph_run(self, request: m.GraphRun) -> None:
        graph = self._by_id.get((request.device, request.graph_id))
        if graph is None:
            raise RemoteProtocolError(f"graph {request.graph_id} of device {request.device} is not kept here")
        self._run(graph)

    def _graph_drop(self, request: m.GraphDrop) -> None:
        """Not an error for a graph that is gone: a FREE may have taken it."""
        graph = self._by_id.pop((request.device, request.graph_id), None)
        if graph is not None:
            self._release(graph)

    def _prepare(self, device: int, body: memoryview) -> Graph:
        station = self._station(device)
        program = decode_graph(body, self._buffers, device, f"{self.peer} on device {device}")
        handle = station.device.prepare(program)
        buffers = frozenset(tensor.buffer for tensor in program.tensors if tensor.buffer is not None)
        return Graph(station, handle, buffers)

    def _run(self, graph: Graph) -> None:
        graph.station.run(graph.handle).add_done_callback(self._ran)

    def _ran(self, event: Future[None]) -> None:
        """A graph that failed has no answer that could say so: the connection ends."""
        if (error := event.exception()) is not None:
            self.stop(f"a graph failed: {error}")

    @staticmethod
    def _release(graph: Graph) -> None:
        graph.station.device.release(graph.handle)

    # -- Tandem's own ---------------------------------------------------------------------------------------------

    def _describe(self, request: m.Describe) -> None:
        del request
        caps = [station.device.caps for station in self._worker.stations]
        devices = [
            {"kind": c.kind, "kernel_variant": c.kernel_variant, "description": c.description or c.kind} for c in caps
        ]
        text = json.dumps({"devices": devices}).encode()
        self._send(ANSWER_HEADER.pack(len(text)), text)

    def _write_batch(self, request: m.WriteBatch) -> None:
        items = memoryview(bytes(request.items))  # the device reads it after the next request has come in
        at = 0
        while at < len(items):
            data_at = at + BATCH_ITEM.size
            if data_at > len(items):
                raise RemoteProtocolError("a batch of writes ends in the middle of an address")
            address, size = BATCH_ITEM.unpack_from(items, at)
            at = data_at + size
            if at > len(items):
                raise RemoteProtocolError(f"a batch announces {size} bytes, {len(items) - data_at} are left")
            spot = self._address(address, size)
            spot.station.device.write(spot.buffer, spot.offset, items[data_at:at])

    def _read_region(self, request: m.ReadRegion) -> None:
        self._send_range(self._address(request.address, request.size_bytes), request.size_bytes)

    def _ping(self, request: m.Ping) -> None:
        self._answer(request.command, m.Value(request.nonce))

    # -- the end --------------------------------------------------------------------------------------------------

    def _free_everything(self) -> None:
        try:
            for graph in (*self._seen.values(), *self._by_id.values()):
                self._release(graph)
            for mapped in self._buffers.values():
                self._station(mapped.device).free(mapped.buffer)
        except ProtocolError:
            raise
        except TandemError as error:  # the device is closed: its memory went with it
            log.debug("nothing to free for client %s: %s", self.peer, error)
        self._seen.clear()
        self._by_id.clear()
        self._stored.clear()
        self._buffers.clear()


def _unplaced(tensor: RpcTensor) -> PlacedTensor:
    """A described tensor without memory, for GET_ALLOC_SIZE."""
    return PlacedTensor(
        type=checked_type(tensor),
        ne=tensor.ne,
        nb=tensor.nb,
        op=OPS.get(tensor.op, Op.NONE),
        params=tensor.params,
        flags=TensorFlag(tensor.flags & 31),
        src=(),
        view_src=-1,
        view_offs=0,
        buffer=None,
        offset=0,
        name=tensor.name.decode(errors="replace"),
    )


_HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.HELLO: Session._hello,
    Command.DEVICE_COUNT: Session._device_count,
    Command.GET_ALIGNMENT: Session._get_alignment,
    Command.GET_MAX_SIZE: Session._get_max_size,
    Command.GET_DEVICE_MEMORY: Session._get_device_memory,
    Command.GET_ALLOC_SIZE: Session._get_alloc_size,
    Command.ALLOC_BUFFER: Session._alloc_buffer,
    Command.BUFFER_GET_BASE: Session._buffer_get_base,
    Command.FREE_BUFFER: Session._free_buffer,
    Command.BUFFER_CLEAR: Session._buffer_clear,
    Command.SET_TENSOR: Session._set_tensor,
    Command.SET_TENSOR_HASH: Session._set_tensor_hash,
    Command.GET_TENSOR: Session._get_tensor,
    Command.COPY_TENSOR: Session._copy_tensor,
    Command.MEMSET_TENSOR: Session._memset_tensor,
    Command.INIT_TENSOR: Session._init_tensor,
    Command.GRAPH_COMPUTE: Session._graph_compute,
    Command.GRAPH_RECOMPUTE: Session._graph_recompute,
    Command.DESCRIBE: Session._describe,
    Command.GRAPH_STORE: Session._graph_store,
    Command.GRAPH_RUN: Session._graph_run,
    Command.GRAPH_DROP: Session._graph_drop,
    Command.WRITE_BATCH: Session._write_batch,
    Command.READ_REGION: Session._read_region,
    Command.PING: Session._ping,
}
