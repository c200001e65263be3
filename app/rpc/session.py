"""One client of a worker: what it asks, one request after the other.

Nothing a client says is believed before it is checked; a violation ends this session and no other. Requests are parsed
by `protocol`, ranges checked by `holdings`, graphs by `lower` and the device; here they meet.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from app.engine.device import Device
from app.engine.ggml import Op, TensorFlag
from app.engine.program import PlacedTensor
from app.errors import DeviceError, InternalError, RemoteProtocolError, TandemError
from app.rpc import messages as m
from app.rpc.answers import Answers, Staging
from app.rpc.client_socket import ClientSocket
from app.rpc.graphs import Graph, Graphs
from app.rpc.holdings import Holdings, Spot
from app.rpc.lower import OPS, checked_type, locate_tensor
from app.rpc.protocol import RequestParser, encode_answer
from app.rpc.specs import MAX_TEXT_ANSWER_BYTES, SPECS
from app.rpc.station import Station
from app.rpc.transfers import BATCH_ITEM
from app.rpc.weight_cache import CacheWriter
from app.rpc.wire import ANSWER_HEADER, FIRST_EXTENSION, TANDEM_PAD, U64_MAX, Command, RpcTensor

if TYPE_CHECKING:
    from app.rpc.worker import Worker

log = logging.getLogger(__name__)

#: Bulk data goes from the socket to a device whose memory is not ours, and back, in pieces of this size.
PIECE_BYTES = 1 << 20

#: Inputs and results from this size on are moved while the device computes the one before or the next.
OVERLAP_BYTES = 256 << 10

#: As much may be queued on a device unseen; then the session waits, and with it the client.
MAX_UNSEEN_CALLS, MAX_UNSEEN_BYTES = 512, 64 << 20

#: A 6.0 client does not say what a weight is; like a stock worker we keep whatever is longer than this.
KEPT_ABOVE_BYTES_6_0 = 10 << 20


class Session:
    """Serves one connected socket until the client leaves, breaks the rules, or stays silent within a request."""

    def __init__(self, worker: Worker, sock: socket.socket, client: str, parser: RequestParser) -> None:
        settings = worker.settings
        self.client = client
        self._worker = worker
        self._specs = SPECS[settings.version]
        self._parser = parser
        self._socket = ClientSocket(sock, parser, hello_s=settings.hello_s, idle_s=settings.idle_s)
        self._holdings = Holdings(worker.stations, worker.new_address)
        self._graphs = Graphs(self._holdings, client)
        self._answers = Answers(self._socket, self._check, self._answers_ended)
        self._staging = Staging()
        self._understands_notices = False
        #: Devices that were given work since they were last seen to be done with all of it.
        self._busy: set[Station] = set()
        self._unseen_calls = self._unseen_bytes = 0
        #: The end of the last run on each device.
        self._runs: dict[Station, Future[None]] = {}
        #: Bulk bytes written since the last run: whether the next one belongs to a prompt.
        self._bulk_bytes = 0
        self._failure: str | None = None

    def run(self) -> None:
        """Serve until the end, then free everything the client had."""
        reason: str | None = None
        try:
            self._serve()
        except (TandemError, MemoryError) as error:
            reason = self._failure or str(error) or type(error).__name__
        except (EOFError, OSError) as error:
            reason = self._failure
            log.debug("client %s left: %s", self.client, error)
        except Exception:
            log.exception("a bug in this worker ended the session of client %s", self.client)
        finally:
            self._answers.close()
            if reason is not None:
                log.warning("closed client %s: %s", self.client, reason)
                if self._understands_notices:
                    self._socket.say_why(reason)
            self._free_everything()
            self._socket.close()

    def stop(self) -> None:
        """Hang up, from any thread."""
        self._socket.stop()

    def _serve(self) -> None:
        if self._parser.greeted:  # before this session began
            self._hello(m.Hello())
        while True:
            request = self._socket.next_request()
            self._check()
            if request.command >= FIRST_EXTENSION:
                self._understands_notices = True
            _HANDLERS[request.command](self, request)

    def _check(self) -> None:
        """Nothing is done and nothing answered after a graph has failed."""
        if self._failure is not None:
            raise DeviceError(self._failure)

    def _work_for(self, station: Station, n_bytes: int = 0) -> Device:
        """The device, which is about to be given something to do, with `n_bytes` of ours to keep until it is done."""
        self._unseen_calls += 1
        self._unseen_bytes += n_bytes
        if self._unseen_calls > MAX_UNSEEN_CALLS or self._unseen_bytes > MAX_UNSEEN_BYTES:
            for busy in tuple(self._busy):
                self._await(busy)
        self._busy.add(station)
        return station.device

    def _await(self, station: Station) -> None:
        """Wait until a device is done with all that it was given. Raises what went wrong."""
        station.device.record().result()
        self._seen(station)
        self._check()

    def _seen(self, station: Station) -> None:
        """A device was seen to be done with all that it was given."""
        self._busy.discard(station)
        if not self._busy:
            self._unseen_calls = self._unseen_bytes = 0

    def _is_computing(self, station: Station) -> bool:
        """Whether a graph of this client runs, or is about to: then nothing is waited for that waits for it."""
        run = self._runs.get(station)
        return run is not None and not run.done()

    def _answers_ended(self, error: BaseException) -> None:
        if isinstance(error, TandemError):
            self._failure = self._failure or str(error)
        elif not isinstance(error, OSError):
            log.error("a bug in this worker ended the answers to client %s", self.client, exc_info=error)
        self._socket.stop_reading()

    def _answer(self, command: Command, answer: Any) -> None:
        self._check()
        layout = self._specs[command].answer
        assert layout is not None
        self._answers.send(encode_answer(layout, answer))

    # -- facts ----------------------------------------------------------------------------------------------------

    def _hello(self, request: m.Hello) -> None:
        settings = self._worker.settings
        pad = TANDEM_PAD if settings.extensions else 0
        self._answer(request.command, m.HelloAnswer(*settings.version, 0, pad))

    def _device_count(self, request: m.DeviceCount) -> None:
        self._answer(request.command, m.Value(len(self._worker.stations)))

    def _get_alignment(self, request: m.GetAlignment) -> None:
        """The cheapest answer is also the client's event: it proves that everything before it is done."""
        station = self._holdings.station(request.device)
        if self._is_computing(station):
            layout = self._specs[request.command].answer
            assert layout is not None
            answer = encode_answer(layout, m.Value(station.device.caps.alignment_bytes))
            self._answers.send_later(station.device.record(), answer, then=lambda: None)
            return
        if station in self._busy:
            self._await(station)
        self._answer(request.command, m.Value(station.device.caps.alignment_bytes))

    def _get_max_size(self, request: m.GetMaxSize) -> None:
        self._answer(request.command, m.Value(self._holdings.station(request.device).device.caps.max_buffer_bytes))

    def _get_device_memory(self, request: m.GetDeviceMemory) -> None:
        memory = self._holdings.station(request.device).memory()
        self._answer(request.command, m.MemoryAnswer(memory.free_bytes, memory.total_bytes))

    def _get_alloc_size(self, request: m.GetAllocSize) -> None:
        device = self._holdings.station(request.device).device
        sources = tuple(_unplaced(source) for source in request.sources if source.id)
        size = device.alloc_bytes(_unplaced(request.tensor), sources)
        if size > U64_MAX:
            raise RemoteProtocolError(f"a tensor of {size} bytes is larger than any memory")
        self._answer(request.command, m.Value(size))

    # -- buffers --------------------------------------------------------------------------------------------------

    def _alloc_buffer(self, request: m.AllocBuffer) -> None:
        handle = self._holdings.alloc(request.device, request.size_bytes)
        if handle is None:
            log.info("refused %d bytes on device %d to client %s", request.size_bytes, request.device, self.client)
            self._answer(request.command, m.Allocated(0, 0))
        else:
            self._answer(request.command, m.Allocated(handle, request.size_bytes))

    def _buffer_get_base(self, request: m.BufferGetBase) -> None:
        self._answer(request.command, m.Value(self._holdings.mapped(request.remote_ptr).base))

    def _free_buffer(self, request: m.FreeBuffer) -> None:
        self._graphs.forget(self._holdings.mapped(request.remote_ptr).buffer)
        self._holdings.free(request.remote_ptr)

    def _buffer_clear(self, request: m.BufferClear) -> None:
        mapped = self._holdings.mapped(request.remote_ptr)
        device = self._work_for(self._holdings.station(mapped.device))
        device.fill(mapped.buffer, 0, mapped.buffer.size_bytes, request.value)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _set_tensor(self, request: m.SetTensor) -> None:
        size = self._socket.payload_left
        spot = self._holdings.range(request.tensor, request.offset, size)
        keeper = self._worker.weights.writer(size) if self._shall_keep(request, size) else None
        try:
            self._receive(spot, size, keeper)
        except BaseException:
            if keeper is not None:
                keeper.abandon()
            raise
        if keeper is not None:
            keeper.finish()

    def _shall_keep(self, request: m.SetTensor, size: int) -> bool:
        """7.0 says which tensors are weights; of 6.0 the size is all one knows."""
        return bool(request.cache) or (self._worker.settings.version == (6, 0) and size > KEPT_ABOVE_BYTES_6_0)

    def _receive(self, spot: Spot, size: int, keeper: CacheWriter | None) -> None:
        """Bulk data into a device: straight from the socket where its memory is ours, else piece by piece.

        While the device computes they are received all the same and wait here for their turn.
        """
        if size >= OVERLAP_BYTES:
            self._bulk_bytes += size
            if self._is_computing(spot.station) and (staged := self._staging.take(size)) is not None:
                self._receive_ahead(spot, staged, keeper)
                return
        view = self._host_view(spot, size)
        if view is None:
            self._receive_in_pieces(spot, size, keeper)
            return
        step = size if keeper is None else PIECE_BYTES
        for start in range(0, size, max(step, 1)):
            piece = view[start : start + step]
            self._socket.receive_payload(piece)
            if keeper is not None:
                keeper.add(piece)

    def _receive_ahead(self, spot: Spot, staged: memoryview, keeper: CacheWriter | None) -> None:
        self._socket.receive_payload(staged)
        if keeper is not None:
            keeper.add(staged)
        written = self._work_for(spot.station).write(spot.buffer, spot.offset, staged)
        written.add_done_callback(lambda _: self._staging.give(staged))

    def _receive_in_pieces(self, spot: Spot, size: int, keeper: CacheWriter | None) -> None:
        """Each piece is handed to the device while the next arrives; memory does not grow with `size`."""
        device = self._work_for(spot.station)
        moving: list[tuple[Future[None], bytearray]] = []
        for start in range(0, size, PIECE_BYTES):
            n = min(PIECE_BYTES, size - start)
            if len(moving) == 2:
                done, piece = moving.pop(0)
                done.result()
            else:
                piece = bytearray(n)
            view = memoryview(piece)[:n]
            self._socket.receive_payload(view)
            if keeper is not None:
                keeper.add(view)
            moving.append((device.write(spot.buffer, spot.offset + start, view), piece))

    def _host_view(self, spot: Spot, size: int) -> memoryview | None:
        """The range itself, once the device is done with all it was given; None where it cannot be had."""
        view = spot.station.device.host_view(spot.buffer, spot.offset, size)
        if view is not None:
            self._seen(spot.station)
            self._check()
        return view

    def _set_tensor_hash(self, request: m.SetTensorHash) -> None:
        """Only bytes that fill the tensor exactly are taken: a hash says little without its length."""
        _, _, n_bytes = locate_tensor(request.tensor, self._holdings.buffers)
        size = n_bytes - request.offset
        if size < 0:
            raise RemoteProtocolError(f"offset {request.offset} is behind the end of a tensor of {n_bytes} bytes")
        data = self._worker.weights.find(request.hash, size)
        if data is not None:
            spot = self._holdings.range(request.tensor, request.offset, size)
            self._work_for(spot.station).write(spot.buffer, spot.offset, data)
        self._answer(request.command, m.Value(int(data is not None)))

    def _get_tensor(self, request: m.GetTensor) -> None:
        self._send(self._holdings.range(request.tensor, request.offset, request.size_bytes), request.size_bytes)

    def _send(self, spot: Spot, size: int) -> None:
        """A device's bytes as an answer: where they lie if possible, else one piece is fetched while one is sent."""
        header: bytes = ANSWER_HEADER.pack(size)
        computing = self._is_computing(spot.station)
        if computing and (staged := self._staging.take(size)) is not None:
            ready = spot.station.device.read(spot.buffer, spot.offset, size, staged)
            self._answers.send_later(ready, header, staged, then=lambda: self._staging.give(staged))
            return
        self._answers.drain()
        self._check()
        view = self._host_view(spot, size)
        if view is not None:
            self._answers.send(header, view)
            return
        device = spot.station.device
        following = device.read(spot.buffer, spot.offset, min(PIECE_BYTES, size))
        for start in range(0, max(size, 1), PIECE_BYTES):
            piece = following.result()
            rest = size - start - len(piece)
            if rest > 0:
                at = spot.offset + start + len(piece)
                following = device.read(spot.buffer, at, min(PIECE_BYTES, rest))
            self._check()
            self._answers.send(header, piece)
            header = b""
        self._seen(spot.station)

    def _copy_tensor(self, request: m.CopyTensor) -> None:
        """Refused with 0, so that the client moves the bytes itself, when a device cannot do it alone."""
        source, source_at, n = locate_tensor(request.source, self._holdings.buffers)
        target, target_at, room = locate_tensor(request.target, self._holdings.buffers)
        if n > room:
            raise RemoteProtocolError(f"a copy of {n} bytes into a tensor of {room} bytes")
        overlap = source.buffer is target.buffer and source_at < target_at + n and target_at < source_at + n
        done = source.device == target.device and not overlap
        if done and n:
            device = self._work_for(self._holdings.station(source.device))
            device.copy(source.buffer, source_at, target.buffer, target_at, n)
        self._answer(request.command, m.Value(int(done)))

    def _memset_tensor(self, request: m.MemsetTensor) -> None:
        spot = self._holdings.range(request.tensor, request.offset, request.size_bytes)
        if request.size_bytes:
            self._work_for(spot.station).fill(spot.buffer, spot.offset, request.size_bytes, request.value)

    def _init_tensor(self, request: m.InitTensor) -> None:
        """Our devices read no padding, so there is nothing to zero; the tensor must be right all the same."""
        locate_tensor(request.tensor, self._holdings.buffers)

    # -- graphs ---------------------------------------------------------------------------------------------------

    def _graph_compute(self, request: m.GraphCompute) -> None:
        self._run(self._graphs.compute(request.device, request.graph))

    def _graph_recompute(self, request: m.GraphRecompute) -> None:
        self._run(self._graphs.last(request.device))

    def _graph_store(self, request: m.GraphStore) -> None:
        try:
            self._graphs.keep(request.device, request.graph_id, request.graph)
            reason = b""
        except DeviceError as error:
            reason = str(error).encode()[:MAX_TEXT_ANSWER_BYTES]
        self._answers.send(ANSWER_HEADER.pack(len(reason)), reason)

    def _graph_run(self, request: m.GraphRun) -> None:
        self._run(self._graphs.kept(request.device, request.graph_id))

    def _graph_drop(self, request: m.GraphDrop) -> None:
        self._graphs.drop(request.device, request.graph_id)

    def _run(self, graph: Graph) -> None:
        self._work_for(graph.station)
        ended = graph.station.run(graph.handle, at_once=self._bulk_bytes == 0)
        self._bulk_bytes = 0
        self._runs[graph.station] = ended
        ended.add_done_callback(self._ran)

    def _ran(self, event: Future[None]) -> None:
        """A graph that failed has no answer that could say so: the connection ends."""
        if (error := event.exception()) is not None:
            if isinstance(error, InternalError):
                log.error("a bug in this worker ended a graph of client %s", self.client, exc_info=error)
            self._failure = f"a graph failed: {error}"
            self._socket.stop_reading()

    # -- Tandem's own ---------------------------------------------------------------------------------------------

    def _describe(self, request: m.Describe) -> None:
        del request
        caps = [station.device.caps for station in self._worker.stations]
        devices = [
            {"kind": c.kind, "kernel_variant": c.kernel_variant, "description": c.description or c.kind} for c in caps
        ]
        text = json.dumps({"devices": devices, "keeps_weights": not self._worker.weights.is_empty}).encode()
        self._answers.send(ANSWER_HEADER.pack(len(text)), text)

    def _write_batch(self, request: m.WriteBatch) -> None:
        items = request.items
        at = 0
        while at < len(items):
            data_at = at + BATCH_ITEM.size
            if data_at > len(items):
                raise RemoteProtocolError("a batch of writes ends in the middle of an address")
            address, size = BATCH_ITEM.unpack_from(items, at)
            at = data_at + size
            if at > len(items):
                raise RemoteProtocolError(f"a batch announces {size} bytes, {len(items) - data_at} are left")
            self._put(self._holdings.at(address, size), items[data_at:at])

    def _put(self, spot: Spot, data: memoryview) -> None:
        """A few bytes into a device. They are copied: `data` changes when the next request comes in."""
        view = None if self._is_computing(spot.station) else self._host_view(spot, len(data))
        if view is not None:
            view[:] = data
        else:
            self._work_for(spot.station, len(data)).write(spot.buffer, spot.offset, bytes(data))

    def _read_region(self, request: m.ReadRegion) -> None:
        self._send(self._holdings.at(request.address, request.size_bytes), request.size_bytes)

    def _ping(self, request: m.Ping) -> None:
        self._answer(request.command, m.Value(request.nonce))

    # -- the end --------------------------------------------------------------------------------------------------

    def _free_everything(self) -> None:
        try:
            self._graphs.forget_all()
            self._holdings.free_all()
        except DeviceError as error:  # the device is closed: its memory went with it
            log.debug("nothing to free for client %s: %s", self.client, error)


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
