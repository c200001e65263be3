"""A client's buffers, and what is done to their bytes without any travelling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.lower import locate_tensor
from app.rpc.wire import Command

if TYPE_CHECKING:
    from app.rpc.session import Session

log = logging.getLogger(__name__)


def alloc_buffer(session: Session, request: m.AllocBuffer) -> None:
    handle = session.holdings.alloc(request.device, request.size_bytes)
    if handle is None:
        log.info("refused %d bytes on device %d to client %s", request.size_bytes, request.device, session.client)
        session.answer(request.command, m.Allocated(0, 0))
    else:
        session.answer(request.command, m.Allocated(handle, request.size_bytes))


def buffer_get_base(session: Session, request: m.BufferGetBase) -> None:
    session.answer(request.command, m.Value(session.holdings.mapped(request.remote_ptr).base))


def free_buffer(session: Session, request: m.FreeBuffer) -> None:
    session.graphs.forget(session.holdings.mapped(request.remote_ptr).buffer)
    session.holdings.free(request.remote_ptr)


def buffer_clear(session: Session, request: m.BufferClear) -> None:
    mapped = session.holdings.mapped(request.remote_ptr)
    device = session.workload.device(session.holdings.station(mapped.device))
    device.fill(mapped.buffer, 0, mapped.buffer.size_bytes, request.value)


def memset_tensor(session: Session, request: m.MemsetTensor) -> None:
    spot = session.holdings.range(request.tensor, request.offset, request.size_bytes)
    if request.size_bytes:
        session.workload.device(spot.station).fill(spot.buffer, spot.offset, request.size_bytes, request.value)


def init_tensor(session: Session, request: m.InitTensor) -> None:
    """Our devices read no padding, so there is nothing to zero; the tensor must be right all the same."""
    locate_tensor(request.tensor, session.holdings.buffers)


def copy_tensor(session: Session, request: m.CopyTensor) -> None:
    """Refused with 0, so that the client moves the bytes itself, when a device cannot do it alone."""
    source, source_at, n = locate_tensor(request.source, session.holdings.buffers)
    target, target_at, room = locate_tensor(request.target, session.holdings.buffers)
    if n > room:
        raise RemoteProtocolError(f"a copy of {n} bytes into a tensor of {room} bytes")
    overlap = source.buffer is target.buffer and source_at < target_at + n and target_at < source_at + n
    done = source.device == target.device and not overlap
    if done and n:
        device = session.workload.device(session.holdings.station(source.device))
        device.copy(source.buffer, source_at, target.buffer, target_at, n)
    session.answer(request.command, m.Value(int(done)))


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.ALLOC_BUFFER: alloc_buffer,
    Command.BUFFER_GET_BASE: buffer_get_base,
    Command.FREE_BUFFER: free_buffer,
    Command.BUFFER_CLEAR: buffer_clear,
    Command.MEMSET_TENSOR: memset_tensor,
    Command.INIT_TENSOR: init_tensor,
    Command.COPY_TENSOR: copy_tensor,
}
