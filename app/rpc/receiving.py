"""Bytes into a worker's devices: bulk data of SET_TENSOR, weights that are here already, small writes, masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from app.engine.mask import MASK_BYTES, MaskRecipe
from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.client_socket import ClientSocket
from app.rpc.holdings import Spot
from app.rpc.lower import locate_tensor
from app.rpc.sending import PIECE_BYTES
from app.rpc.transfers import BATCH_ITEM
from app.rpc.weight_cache import CacheWriter
from app.rpc.wire import Command

if TYPE_CHECKING:
    from app.rpc.session import Session

#: Inputs from this size on are received while the device computes what came before.
OVERLAP_BYTES = 48 << 10

#: Small writes that lie as close together are put into one view of a device's memory.
ONE_VIEW_BYTES = 4 << 20

#: A 6.0 client does not say what a weight is; like a stock worker we keep whatever is longer than this.
KEPT_ABOVE_BYTES_6_0 = 10 << 20


def set_tensor(session: Session, request: m.SetTensor) -> None:
    size = session.socket.payload_left
    spot = session.holdings.range(request.tensor, request.offset, size)
    keeper = session.worker.weights.writer(size) if _shall_keep(session, request, size) else None
    try:
        receive(session, session.socket, spot, size, keeper)
    except BaseException:
        if keeper is not None:
            keeper.abandon()
        raise
    if keeper is not None:
        keeper.finish()


def _shall_keep(session: Session, request: m.SetTensor, size: int) -> bool:
    """7.0 says which tensors are weights; of 6.0 the size is all one knows."""
    return bool(request.cache) or (session.worker.settings.version == (6, 0) and size > KEPT_ABOVE_BYTES_6_0)


def receive(session: Session, source: ClientSocket, spot: Spot, size: int, keeper: CacheWriter | None = None) -> None:
    """Bulk data into a device: straight from the socket where its memory is ours, else piece by piece.

    While the device computes they are received all the same and wait here for their turn.
    """
    workload = session.workload
    if size >= OVERLAP_BYTES:
        workload.bulk_bytes += size
        if workload.is_computing(spot.station) and (staged := session.staging.take(size)) is not None:
            _receive_ahead(session, source, spot, staged, keeper)
            return
    view = workload.host_view(spot, size)
    if view is None:
        _receive_in_pieces(session, source, spot, size, keeper)
        return
    step = size if keeper is None else PIECE_BYTES
    for start in range(0, size, max(step, 1)):
        piece = view[start : start + step]
        source.receive_payload(piece)
        if keeper is not None:
            keeper.add(piece)


def _receive_ahead(
    session: Session, source: ClientSocket, spot: Spot, staged: memoryview, keeper: CacheWriter | None
) -> None:
    try:
        source.receive_payload(staged)
    except BaseException:
        session.staging.give(staged)
        raise
    if keeper is not None:
        keeper.add(staged)
    written = session.workload.device(spot.station).write(spot.buffer, spot.offset, staged)
    written.add_done_callback(lambda _: session.staging.give(staged))


def _receive_in_pieces(
    session: Session, source: ClientSocket, spot: Spot, size: int, keeper: CacheWriter | None
) -> None:
    """Each piece is handed to the device while the next arrives; memory does not grow with `size`."""
    device = session.workload.device(spot.station)
    moving: list[tuple[Future[None], bytearray]] = []
    for start in range(0, size, PIECE_BYTES):
        n = min(PIECE_BYTES, size - start)
        if len(moving) == 2:
            done, piece = moving.pop(0)
            done.result()
        else:
            piece = bytearray(n)
        view = memoryview(piece)[:n]
        source.receive_payload(view)
        if keeper is not None:
            keeper.add(view)
        moving.append((device.write(spot.buffer, spot.offset + start, view), piece))


def set_tensor_hash(session: Session, request: m.SetTensorHash) -> None:
    """Only bytes that fill the tensor exactly are taken: a hash says little without its length."""
    _, _, n_bytes = locate_tensor(request.tensor, session.holdings.buffers)
    size = n_bytes - request.offset
    if size < 0:
        raise RemoteProtocolError(f"offset {request.offset} is behind the end of a tensor of {n_bytes} bytes")
    data = session.worker.weights.find(request.hash, size)
    if data is not None:
        spot = session.holdings.range(request.tensor, request.offset, size)
        session.workload.device(spot.station).write(spot.buffer, spot.offset, data)
    session.answer(request.command, m.Value(int(data is not None)))


def write_batch(session: Session, request: m.WriteBatch) -> None:
    write_items(session, request.items)


def write_items(session: Session, items: memoryview) -> None:
    """Nothing is written before everything was checked."""
    writes = _spots(session, items)
    at = 0
    while at < len(writes):
        end = at + 1
        while end < len(writes) and writes[end][0].buffer is writes[at][0].buffer:
            end += 1
        _put(session, writes[at:end])
        at = end


def _spots(session: Session, items: memoryview) -> list[tuple[Spot, memoryview]]:
    writes = []
    at = 0
    while at < len(items):
        data_at = at + BATCH_ITEM.size
        if data_at > len(items):
            raise RemoteProtocolError("a batch of writes ends in the middle of an address")
        address, size = BATCH_ITEM.unpack_from(items, at)
        at = data_at + size
        if at > len(items):
            raise RemoteProtocolError(f"a batch announces {size} bytes, {len(items) - data_at} are left")
        writes.append((session.holdings.at(address, size), items[data_at:at]))
    return writes


def _put(session: Session, writes: list[tuple[Spot, memoryview]]) -> None:
    """A few bytes into one buffer. They are copied: their memory changes when the next request comes in."""
    workload = session.workload
    spot = writes[0][0]
    if not workload.is_computing(spot.station):
        start = min(spot.offset for spot, _ in writes)
        end = max(spot.offset + len(data) for spot, data in writes)
        if end - start <= ONE_VIEW_BYTES:
            writes = _put_in_view(
                workload.host_view(Spot(spot.station, spot.buffer, start), end - start), start, writes
            )
    for spot, data in writes:
        workload.device(spot.station, len(data)).write(spot.buffer, spot.offset, bytes(data))


def _put_in_view(
    view: memoryview | None, start: int, writes: list[tuple[Spot, memoryview]]
) -> list[tuple[Spot, memoryview]]:
    """Copy everything into a view of what lies between; what is left to do, which is all where there is no view."""
    if view is None:
        return writes
    for spot, data in writes:
        at = spot.offset - start
        view[at : at + len(data)] = data
    return []


def write_mask(session: Session, request: m.WriteMask) -> None:
    """The device makes it when it gets there. It means what its bytes would: a large one belongs to a prompt."""
    try:
        recipe = MaskRecipe.unpack(request.recipe)
    except ValueError as error:
        raise RemoteProtocolError(f"WRITE_MASK: {error}") from None
    spot = session.holdings.at(request.address, recipe.n_bytes)
    if spot.offset % MASK_BYTES:
        raise RemoteProtocolError(f"WRITE_MASK: half floats cannot begin at byte {spot.offset} of a buffer")
    if recipe.n_bytes >= OVERLAP_BYTES:
        session.workload.bulk_bytes += recipe.n_bytes
    builds = spot.station.device.builds_masks
    device = session.workload.device(spot.station, len(request.recipe) if builds else recipe.n_bytes)
    device.write_mask(spot.buffer, spot.offset, recipe)


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.SET_TENSOR: set_tensor,
    Command.SET_TENSOR_HASH: set_tensor_hash,
    Command.WRITE_BATCH: write_batch,
    Command.WRITE_MASK: write_mask,
}
