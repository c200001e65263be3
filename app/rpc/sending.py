"""Bytes out of a worker's devices, as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from app.rpc import messages as m
from app.rpc.holdings import Spot
from app.rpc.wire import ANSWER_HEADER, Command

if TYPE_CHECKING:
    from app.rpc.session import Session

#: Bulk data goes from the socket to a device whose memory is not ours, and back, in pieces of this size.
PIECE_BYTES = 1 << 20


def get_tensor(session: Session, request: m.GetTensor) -> None:
    size = request.size_bytes
    send(session, session.holdings.range(request.tensor, request.offset, size), size)


def read_region(session: Session, request: m.ReadRegion) -> None:
    send(session, session.holdings.at(request.address, request.size_bytes), request.size_bytes)


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
}
