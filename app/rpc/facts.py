"""What a client asks a worker about itself. Nothing here changes anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from app.engine.ggml import Op, TensorFlag
from app.engine.program import PlacedTensor
from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.lower import OPS, checked_type
from app.rpc.wire import TANDEM_PAD, U64_MAX, Command, RpcTensor

if TYPE_CHECKING:
    from app.rpc.session import Session


def hello(session: Session, request: m.Hello) -> None:
    settings = session.worker.settings
    pad = TANDEM_PAD if settings.extensions else 0
    session.answer(request.command, m.HelloAnswer(*settings.version, 0, pad))


def device_count(session: Session, request: m.DeviceCount) -> None:
    session.answer(request.command, m.Value(len(session.worker.stations)))


def get_alignment(session: Session, request: m.GetAlignment) -> None:
    """The cheapest answer is also the client's event: it proves that everything before it is done."""
    station = session.holdings.station(request.device)
    alignment = m.Value(station.device.caps.alignment_bytes)
    if session.workload.is_computing(station):
        answer = session.encode(request.command, alignment)
        session.answers.send_later(station.device.record(), answer, then=lambda: None)
        return
    if session.workload.is_busy(station):
        session.workload.wait(station)
    session.answer(request.command, alignment)


def get_max_size(session: Session, request: m.GetMaxSize) -> None:
    session.answer(request.command, m.Value(session.holdings.station(request.device).device.caps.max_buffer_bytes))


def get_device_memory(session: Session, request: m.GetDeviceMemory) -> None:
    memory = session.holdings.station(request.device).memory()
    session.answer(request.command, m.MemoryAnswer(memory.free_bytes, memory.total_bytes))


def get_alloc_size(session: Session, request: m.GetAllocSize) -> None:
    device = session.holdings.station(request.device).device
    sources = tuple(_unplaced(source) for source in request.sources if source.id)
    size = device.alloc_bytes(_unplaced(request.tensor), sources)
    if size > U64_MAX:
        raise RemoteProtocolError(f"a tensor of {size} bytes is larger than any memory")
    session.answer(request.command, m.Value(size))


def describe(session: Session, request: m.Describe) -> None:
    del request
    caps = [station.device.caps for station in session.worker.stations]
    devices: list[dict[str, str]] = [
        {"kind": c.kind, "kernel_variant": c.kernel_variant, "description": c.description or c.kind} for c in caps
    ]
    worker = session.worker
    told = {"devices": devices, "keeps_weights": not worker.weights.is_empty, "identity": worker.identity}
    can = {"pushes": True, "selects_rows": True, "takes_turns": True, "builds_masks": True}
    session.answer_text(json.dumps(told | can).encode())


def ping(session: Session, request: m.Ping) -> None:
    session.answer(request.command, m.Value(request.nonce))


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


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.HELLO: hello,
    Command.DEVICE_COUNT: device_count,
    Command.GET_ALIGNMENT: get_alignment,
    Command.GET_MAX_SIZE: get_max_size,
    Command.GET_DEVICE_MEMORY: get_device_memory,
    Command.GET_ALLOC_SIZE: get_alloc_size,
    Command.DESCRIBE: describe,
    Command.PING: ping,
}
