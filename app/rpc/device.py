"""A device at the far end of a connection, behind the same contract as a local one.

Everything a caller submits becomes commands in one FIFO, so call order is wire order and the worker's order. Only what
must be known at start is waited for: `alloc`, `prepare`, `memory` and `alloc_bytes` make round trips.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from app.engine.connection import ConnectionStats
from app.engine.device import (
    Device,
    DeviceCaps,
    DeviceMemory,
    Handle,
    Payload,
    WeightHint,
    check_mask_place,
    check_target,
)
from app.engine.ggml import MAX_SRC, TRAITS, Op
from app.engine.mask import MAX_PACKED_BYTES, MaskRecipe
from app.engine.opcheck import check_program
from app.engine.program import Buffer, PlacedTensor, Program
from app.engine.route import Route
from app.engine.rows import F32_BYTES, RowSelection
from app.errors import DeviceError, DeviceLost, OutOfDeviceMemory, TandemError, UnsupportedOp
from app.rpc.awaited import Awaited
from app.rpc.handle import RpcHandle
from app.rpc.link import Link, RpcBuffer
from app.rpc.lower import Address, describe_tensor, encode_graph
from app.rpc.messages import (
    AllocBuffer,
    BufferClear,
    BufferGetBase,
    FreeBuffer,
    GetAlignment,
    GetAllocSize,
    GetDeviceMemory,
    GraphCompute,
    GraphDrop,
    GraphRecompute,
    GraphRun,
    GraphStore,
    InitTensor,
    MemsetTensor,
    Value,
)
from app.rpc.outbox import Answer, settle
from app.rpc.protocol import encode
from app.rpc.routes import RouteEnd, open_route
from app.rpc.sender import Sender
from app.rpc.transfers import CHUNK_BYTES, CHUNK_BYTES_6_0, SMALL_BYTES, chunks
from app.rpc.wire import RpcTensor, region

log = logging.getLogger(__name__)

#: Ops whose results may need scratch behind them, by backend; see also quantized rows that are padded.
_SCRATCH_OPS = frozenset({Op.FLASH_ATTN_EXT, Op.MUL_MAT, Op.MUL_MAT_ID, Op.CUMSUM, Op.ARGSORT, Op.TOP_K})
_PADDED_ROW_ELEMENTS = 512

#: How long `close` waits for submitted work before it hangs up.
CLOSE_GRACE_S = 5.0

T = TypeVar("T")

_DONE: Future[None] = Future()
_DONE.set_result(None)


@dataclass(frozen=True, slots=True)
class _Frames:
    """Commands of one device that never change."""

    record: bytes
    recompute: bytes


class RpcDevice(Device):
    """One device of one worker. Made by `connect`.

    Weights longer than `offers_above_bytes` are offered by their hash before they are sent; None: never.
    """

    def __init__(self, name: str, link: Link, index: int, caps: DeviceCaps, *, offers_above_bytes: int | None) -> None:
        self.name = name
        self.caps = caps
        self.index = index
        self.link = link
        self.selects_rows = link.selects_rows
        self.builds_masks = link.builds_masks
        self._version = link.peer.version
        self._offers_above_bytes = offers_above_bytes
        self._sender = Sender(link)
        self._alloc_sizes: dict[object, int] = {}
        self._padded: set[tuple[int, int]] = set()
        self._buffers: set[RpcBuffer] = set()
        self._frames = _Frames(encode(GetAlignment(index), self._version), encode(GraphRecompute(index), self._version))
        self._closed = False

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> DeviceMemory:
        self._check()
        answer = self.link.call(GetDeviceMemory(self.index))
        return DeviceMemory(answer.free_bytes, answer.total_bytes)

    def alloc(self, size_bytes: int) -> Buffer:
        self._check()
        if size_bytes < 0:
            raise DeviceError(f"a buffer of {size_bytes} bytes makes no sense")
        if size_bytes > self.caps.max_buffer_bytes:
            raise OutOfDeviceMemory(self.name, size_bytes, self.caps.max_buffer_bytes)
        answer = self.link.call(AllocBuffer(self.index, max(size_bytes, 1)))
        if not answer.remote_ptr or answer.size_bytes < size_bytes:
            if answer.remote_ptr:
                self._sender.tell(FreeBuffer(answer.remote_ptr))
            raise self._refused(size_bytes)
        base: Value = self.link.call(BufferGetBase(answer.remote_ptr))
        buffer = RpcBuffer(self.name, size_bytes, self.link, Address(answer.remote_ptr, base.value))
        self._buffers.add(buffer)
        return buffer

    def _refused(self, size_bytes: int) -> OutOfDeviceMemory:
        """The refusal is what matters: a worker that does not say what is free must not hide it."""
        try:
            return OutOfDeviceMemory(self.name, size_bytes, self.memory().free_bytes)
        except TandemError as error:
            log.warning("%s refused %d bytes, and did not say what is free: %s", self.name, size_bytes, error)
            return OutOfDeviceMemory(self.name, size_bytes)

    def free(self, buffer: Buffer) -> None:
        mine = self._mine(buffer, 0, 0)
        mine.live = False
        with self.link.lock:
            self._buffers.discard(mine)
            self.link.stored.clear()
            self._padded = {key for key in self._padded if key[0] != mine.address.remote_ptr}
            self._sender.tell(FreeBuffer(mine.address.remote_ptr))

    def alloc_bytes(self, tensor: PlacedTensor, sources: tuple[PlacedTensor, ...]) -> int:
        """Asked once per output and sources: scratch of attention grows with its keys, not with its result."""
        padded = TRAITS[tensor.type].block_elements > 1 and tensor.ne[0] % _PADDED_ROW_ELEMENTS != 0
        if tensor.op not in _SCRATCH_OPS and not padded:
            return tensor.n_bytes
        shapes = tuple((source.type, source.ne, source.nb) for source in sources)
        key = (tensor.type, tensor.ne, tensor.nb, tensor.op, tensor.params, shapes)
        known = self._alloc_sizes.get(key)
        if known is None:
            self._check()
            described = tuple(describe_tensor(source, self.name) for source in sources)
            rest = (RpcTensor(),) * (MAX_SRC - len(sources))
            request = GetAllocSize(self.index, describe_tensor(tensor, self.name), (*described, *rest))
            known = self._alloc_sizes[key] = max(int(self.link.call(request).value), tensor.n_bytes)
        return known

    # -- bytes ----------------------------------------------------------------------------------------------------

    def write(
        self,
        buffer: Buffer,
        offset: int,
        payload: Payload | Future[Payload],
        *,
        size_bytes: int | None = None,
        hint: WeightHint | None = None,
    ) -> Future[None]:
        if isinstance(payload, Future):
            if size_bytes is None:
                raise DeviceError("a write with a future as payload must say how many bytes it will be")
            return self._sender.write_later(self._mine(buffer, offset, size_bytes), offset, payload, size_bytes)
        view = memoryview(payload).cast("B")
        size = len(view)
        if size_bytes is not None and size_bytes != size:
            raise DeviceError(f"a write of {size_bytes} bytes to {self.name} came with {size}")
        mine = self._mine(buffer, offset, size)
        if size == 0:
            return _DONE
        if size <= SMALL_BYTES and hint is None:
            self._sender.write_small(mine, offset, ((0, view),))
            return _DONE
        worth_offering = self._offers_above_bytes is not None and size > self._offers_above_bytes
        if hint is not None and hint.content_hash is not None and worth_offering:
            return self._sender.offer(mine, offset, view, hint.content_hash)
        weight = hint is not None
        return self._sender.write(mine, offset, view, self._chunk_bytes(weight), cache=int(weight))

    def write_pieces(self, buffer: Buffer, offset: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        if not pieces or max(len(view) for _, view in pieces) > SMALL_BYTES:
            super().write_pieces(buffer, offset, pieces)
            return
        first, end = min(at for at, _ in pieces), max(at + len(view) for at, view in pieces)
        self._sender.write_small(self._mine(buffer, offset + first, end - first), offset, pieces)

    def write_mask(self, buffer: Buffer, offset: int, recipe: MaskRecipe) -> Future[None]:
        """A short mask travels as its bytes: they are part of a turn, which a mask of its own is not."""
        if not self.builds_masks or recipe.n_bytes <= SMALL_BYTES or len(recipe.packed) > MAX_PACKED_BYTES:
            return super().write_mask(buffer, offset, recipe)
        mine = self._mine(buffer, offset, recipe.n_bytes)
        check_mask_place(self.name, offset)
        self._sender.write_mask(mine, offset, recipe)
        return _DONE

    def read(self, buffer: Buffer, offset: int, size_bytes: int, into: memoryview | None = None) -> Future[memoryview]:
        mine = self._mine(buffer, offset, size_bytes)
        check_target(self.name, into, size_bytes)
        into = None if into is None else into.cast("B")
        if size_bytes == 0:  # a stock worker refuses an empty range at the end of a buffer; order is all that matters
            return self._event(memoryview(b"") if into is None else into)
        if size_bytes <= CHUNK_BYTES:
            return self._sender.read(mine, offset, size_bytes, into)
        target = memoryview(bytearray(size_bytes)) if into is None else into
        whole: Future[memoryview] = Future()
        with self.link.lock:
            parts = [
                self._sender.read(mine, offset + start, n, target[start : start + n])
                for start, n in chunks(size_bytes, CHUNK_BYTES)
            ]
        parts[-1].add_done_callback(lambda last: settle(whole, target, error=last.exception()))
        return whole

    def read_rows(
        self, buffer: Buffer, offset: int, rows: RowSelection, into: memoryview | None = None
    ) -> Future[memoryview]:
        if not self.selects_rows:
            return super().read_rows(buffer, offset, rows, into)
        mine = self._mine(buffer, offset, rows.source_bytes)
        if (flaw := rows.flaw()) is not None or offset % F32_BYTES:
            raise DeviceError(f"device {self.name}: {flaw or f'rows cannot begin at byte {offset}'}")
        check_target(self.name, into, rows.n_bytes)
        return self._sender.read_rows(mine, offset, rows, None if into is None else into.cast("B"))

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, size_bytes: int) -> None:
        from_, to = self._mine(source, source_offset, size_bytes), self._mine(target, target_offset, size_bytes)
        if from_ is to and abs(source_offset - target_offset) < size_bytes:
            raise DeviceError(f"a copy of {size_bytes} bytes within one buffer of {self.name} overlaps itself")
        with self.link.lock:
            for start, n in chunks(size_bytes, CHUNK_BYTES):
                self._sender.copy(from_, source_offset + start, to, target_offset + start, n)

    def fill(self, buffer: Buffer, offset: int, size_bytes: int, value: int) -> None:
        mine = self._mine(buffer, offset, size_bytes)
        if not 0 <= value <= 255:
            raise DeviceError(f"device {self.name} cannot fill memory with {value}, which is not a byte")
        place = mine.address
        with self.link.lock:
            if offset == 0 and size_bytes == mine.size_bytes:
                self._sender.tell(BufferClear(place.remote_ptr, value))
                return
            for start, n in chunks(size_bytes, CHUNK_BYTES):
                tensor = region(place.remote_ptr, place.base + offset + start, n)
                self._sender.tell(MemsetTensor(tensor, 0, n, value))

    def open_route(self, target: Device) -> Route | None:
        """A Tandem worker pushes to another one that it can reach."""
        if not isinstance(target, RpcDevice) or not (self.link.pushes and target.link.pushes):
            return None
        return open_route(self._route_end(), target._route_end())

    def _route_end(self) -> RouteEnd:
        def address(buffer: Buffer, offset: int, n_bytes: int) -> int:
            return self._mine(buffer, offset, n_bytes).address.base + offset

        return RouteEnd(self.name, self.link, self._sender, address)

    # -- programs -------------------------------------------------------------------------------------------------

    def prepare(self, program: Program) -> Handle:
        self._check()
        check_program(program, self.name)  # a stock worker would end its process over what this refuses
        buffers = frozenset(
            self._mine(tensor.buffer, tensor.offset, tensor.n_bytes)
            for tensor in program.tensors
            if tensor.buffer is not None
        )
        self._zero_padding(program)
        graph = encode_graph(program, self.link.locate, self.name)
        if not self.link.peer.is_tandem:
            head = encode(GraphCompute(self.index, memoryview(graph)), self._version, len(graph))
            return RpcHandle(self, program.name, head + graph, None, buffers)
        graph_id = self.link.new_graph_id()
        request = GraphStore(self.index, graph_id, memoryview(graph))
        frame = encode(GraphRun(self.index, graph_id), self._version)
        handle = RpcHandle(self, program.name, frame, graph_id, buffers)
        is_computing = self.link.dispatcher.is_awaited
        answer: Future[memoryview] = self._sender.ask(request, request.graph)
        if not is_computing:
            if reason := bytes(answer.result()).decode(errors="replace"):
                raise UnsupportedOp(self.name, program.name, reason)
        else:  # the answer comes behind those of all that is being computed, which must not hold anybody up
            answer.add_done_callback(handle.note_refusal)
        return handle

    def run(self, handle: Handle) -> None:
        mine = self._my_handle(handle)
        with self.link.lock:
            if (flaw := mine.flaw) is not None:
                error = DeviceError(f"device {self.name} cannot run {mine.program_name}: {flaw}")
                self._sender.fail("GRAPH_COMPUTE", error)
            elif mine.graph_id is not None:
                self._sender.run("GRAPH_RUN", mine.frame)
            elif self.link.stored.get(self.index) is mine:
                self._sender.submit("GRAPH_RECOMPUTE", self._frames.recompute)
            else:
                self.link.stored[self.index] = mine
                self._sender.submit("GRAPH_COMPUTE", mine.frame)

    def release(self, handle: Handle) -> None:
        mine = self._my_handle(handle)
        with self.link.lock:
            mine.released = True
            if mine.graph_id is not None:
                self._sender.tell(GraphDrop(self.index, mine.graph_id))
            elif self.link.stored.get(self.index) is mine:
                del self.link.stored[self.index]

    def record(self) -> Future[None]:
        self._check()
        return self._event(None)

    def watch(self, on_lost: Callable[[DeviceLost], None]) -> None:
        self.link.dispatcher.watch(on_lost)

    @property
    def connection(self) -> ConnectionStats | None:
        return self.link.dispatcher.stats()

    def close(self) -> None:
        with self.link.lock:
            if self._closed:
                return
            self._closed = True
        self._sender.close()
        try:
            for buffer in self._buffers:  # others may stay on this connection
                buffer.live = False
                self._sender.tell(FreeBuffer(buffer.address.remote_ptr))
            self._event(None).result(CLOSE_GRACE_S)
        except (TandemError, TimeoutError):
            pass  # lost, or too busy to say goodbye: hanging up frees everything at the worker
        self.link.leave()

    # -- details --------------------------------------------------------------------------------------------------

    def _event(self, value: T) -> Future[T]:
        """Resolves to `value` once everything before it is done: when the cheapest question behind it is answered."""
        future: Awaited[T] = self.link.dispatcher.awaited()
        answer = Answer("GET_ALIGNMENT", 8, 8, future, decode=lambda body: value)
        self._sender.submit("GET_ALIGNMENT", self._frames.record, answer)
        return future

    def _check(self) -> None:
        if self._closed:
            raise DeviceLost(self.link.endpoint, "the device was closed")
        self.link.check()

    def _mine(self, buffer: Buffer, offset: int, size_bytes: int) -> RpcBuffer:
        """The buffer, once it is this device's and the range lies inside it."""
        self._check()
        if not isinstance(buffer, RpcBuffer) or buffer.link is not self.link or buffer.device_name != self.name:
            raise DeviceError(f"{buffer!r} does not belong to device {self.name}")
        if not buffer.live:
            raise DeviceError(f"{buffer!r} was freed")
        if offset < 0 or size_bytes < 0 or offset + size_bytes > buffer.size_bytes:
            raise DeviceError(f"{size_bytes} bytes at offset {offset} do not lie inside {buffer!r}")
        return buffer

    def _my_handle(self, handle: Handle) -> RpcHandle:
        self._check()
        if not isinstance(handle, RpcHandle) or handle.device is not self:
            raise DeviceError(f"device {self.name} was given a handle that it did not prepare")
        return handle

    def _chunk_bytes(self, weight: bool) -> int:
        return CHUNK_BYTES if weight or self._version != (6, 0) else CHUNK_BYTES_6_0

    def _zero_padding(self, program: Program) -> None:
        """Let the worker zero what lies behind quantized leaves with padded rows, once per place."""
        with self.link.lock:
            for tensor in program.tensors:
                place = None if tensor.buffer is None else self.link.locate(tensor.buffer)
                if place is None or tensor.op != Op.NONE or tensor.view_src >= 0:
                    continue
                if TRAITS[tensor.type].block_elements == 1 or tensor.ne[0] % _PADDED_ROW_ELEMENTS == 0:
                    continue
                key = (place.remote_ptr, tensor.offset)
                if key in self._padded:
                    continue
                self._padded.add(key)
                record = RpcTensor(
                    *(1, tensor.type, place.remote_ptr, tensor.ne, tensor.nb), data=place.base + tensor.offset
                )
                self._sender.tell(InitTensor(record))
