"""Bytes out of a worker's devices, as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from app.engine.rows import F32_BYTES, RowSelection
from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.holdings import Spot
from app.rpc.wire import ANSWER_HEADER, Command

if TYPE_CHECKING:
    from app.rpc.session import Session

#: Bulk data goes from the socket to a device whose memory is not ours, and back, in pieces of this size.
PIECE_BYTES = 1 << 20


#: More rows than any ubatch has. Every wish becomes objects here that are far larger than its four bytes.
MAX_WISHED_BYTES = 4 << 16


def get_tensor(session: Session, request: m.GetTensor) -> None:
    size = request.size_bytes
    send(session, session.holdings.range(request.tensor, request.offset, size), size)


def read_region(session: Session, request: m.ReadRegion) -> None:
    send(session, session.holdings.at(request.address, request.size_bytes), request.size_bytes)


def read_rows(session: Session, request: m.ReadRows) -> None:
    send_rows(session, *rows_at(session, request))


def rows_at(session: Session, request: m.ReadRows) -> tuple[Spot, RowSelection]:
    """What a client wishes for. Raises RemoteProtocolError before anything is looked at."""
    if len(request.wishes) > MAX_WISHED_BYTES:
        n_bytes = len(request.wishes)
        raise RemoteProtocolError(f"READ_ROWS: {n_bytes} bytes of wishes, at most {MAX_WISHED_BYTES} are taken")
    try:
        rows = RowSelection.unpack(request.n_columns, request.wishes)
    except ValueError as error:
        raise RemoteProtocolError(f"READ_ROWS: {error}") from None
    if (flaw := rows.flaw()) is not None:
        raise RemoteProtocolError(f"READ_ROWS: {flaw}")
    spot = session.holdings.at(request.address, rows.source_bytes)
    if spot.offset % F32_BYTES:
        raise RemoteProtocolError(f"READ_ROWS: floats cannot begin at byte {spot.offset} of a buffer")
    return spot, rows


def prepared(session: Session, request: m.Request | None) -> Callable[[], None] | None:
    """What answers a read that came right behind a run, checked already; None for any other request."""
    if isinstance(request, m.ReadRegion):
        size = request.size_bytes
        return partial(send, session, session.holdings.at(request.address, size), size)
    if isinstance(request, m.ReadRows):
        return partial(send_rows, session, *rows_at(session, request))
    return None


def send_rows(session: Session, spot: Spot, rows: RowSelection) -> None:
    """What is wanted of a device's rows as an answer; looked through where they lie, or brought here piece by piece."""
    if rows.are_whole:
        send(session, spot, rows.n_bytes)
        return
    header: bytes = ANSWER_HEADER.pack(rows.n_bytes)
    device = spot.station.device
    computing = session.workload.is_computing(spot.station)
    if computing and device.selects_rows and (staged := session.staging.take(rows.n_bytes)) is not None:
        ready = device.read_rows(spot.buffer, spot.offset, rows, staged)
        session.answers.send_later(ready, header, staged, then=lambda: session.staging.give(staged))
        return
    session.answers.drain()
    session.check()
    offset = spot.offset
    for some in rows.pieces(PIECE_BYTES):
        size = some.source_bytes
        view = session.workload.host_view(Spot(spot.station, spot.buffer, offset), size)
        if view is None:
            view = device.read(spot.buffer, offset, size).result()
            session.check()
            session.workload.seen(spot.station)
        session.answers.send(header, some.select(view))
        offset, header = offset + size, b""


def send(session: Session, spot: Spot, size: int) -> None:
    """A device's bytes as an answer: where they lie if possible, else one piece is fetched while one is sent."""
    header: bytes = ANSWER_HEADER.pack(size)
    computing = session.workload.is_computing(spot.station)
    if computing and (staged := session.staging.take(size)) is not None:
        ready = spot.station.device.read(spot.buffer, spot.offset, size, staged)
        session.answers.send_later(ready, header, staged, then=lambda: session.staging.give(staged))
        return
    session.answers.drain()
    session.check()
    view = session.workload.host_view(spot, size)
    if view is not None:
        session.answers.send(header, view)
        return
    device = spot.station.device
    following = device.read(spot.buffer, spot.offset, min(PIECE_BYTES, size))
    for start in range(0, max(size, 1), PIECE_BYTES):
        piece = following.result()
        rest = size - start - len(piece)
        if rest > 0:
            at = spot.offset + start + len(piece)
            following = device.read(spot.buffer, at, min(PIECE_BYTES, rest))
        session.check()
        session.answers.send(header, piece)
        header = b""
    session.workload.seen(spot.station)


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.GET_TENSOR: get_tensor,
    Command.READ_REGION: read_region,
    Command.READ_ROWS: read_rows,
}
