"""A decode step as one request: small writes, a kept graph, and a read or a push of what it leaves.

Where the device is idle and can, it does all of it in one call. What a session's thread would do in between is little,
but computing has driven it from this machine's caches: every line of Python there takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from app.engine.device import Turn
from app.engine.rows import F32_BYTES, WHOLE, RowSelection
from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.computing import start
from app.rpc.graphs import Graph
from app.rpc.outlets import Outlet
from app.rpc.pushing import INLINE_PUSH_BYTES, checked_outlet, push
from app.rpc.receiving import write_items
from app.rpc.sending import rows_at, send_rows
from app.rpc.transfers import BATCH_ITEM
from app.rpc.wire import ANSWER_HEADER, Command

if TYPE_CHECKING:
    from app.rpc.session import Session

#: Turns kept per graph: what is wished for changes with the sampling of the requests that are being served.
MAX_TURNS = 16

#: Wishes of more rows than decode steps have go the way of all others: plans are kept with them.
MAX_PLANNED_BYTES = 4 * 64

#: The wishes for a region of floats.
ONE_WHOLE_ROW = memoryview(RowSelection(0, (WHOLE,)).packed)

#: A longer answer goes the way of all others.
MAX_ANSWER_BYTES = 1 << 20


class AnswerRoom:
    """Memory for one whole answer, used again and again. For the session's thread."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, n_bytes: int) -> memoryview:
        """A header that announces so many bytes, and room for them. Good until the next call."""
        size = ANSWER_HEADER.size + n_bytes
        if len(self._memory) < size:
            self._memory = bytearray(size)
        ANSWER_HEADER.pack_into(self._memory, 0, n_bytes)
        return memoryview(self._memory)[:size]


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn that was checked, and how much it answers."""

    turn: Turn
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ReadyTurn:
    """A turn of which nothing is left to be checked, planned or made room for. For now: what stands may change."""

    session: Session
    planned: PlannedTurn
    items: memoryview
    #: A header and, from there on, what the turn leaves.
    answer: memoryview
    #: Sends the answer, to the client or to another worker.
    send: Callable[[memoryview], None]

    def run(self) -> bool:
        """Do it all in one call. False, and nothing is done, where the device is not idle."""
        if not self.planned.turn.run(self.items, self.answer[ANSWER_HEADER.size :]):
            return False
        self.session.check()  # a run before may have failed just now
        self.send(self.answer)
        return True


def take_turn(session: Session, request: m.TakeTurn) -> None:
    ready = ready_turn(session, request)
    if ready is not None and ready.run():
        return
    graph, read, items = _taken_apart(session, request)
    spot, rows = rows_at(session, read)
    write_items(session, items)
    start(session, graph)
    send_rows(session, spot, rows)


def push_turn(session: Session, request: m.PushTurn) -> None:
    ready = ready_turn(session, request)
    if ready is not None and ready.run():
        return
    pushed = _pushed(request)
    checked_outlet(session, pushed)
    write_items(session, request.items)
    start(session, session.graphs.kept(request.device, request.graph_id))
    push(session, pushed)


def ready_turn(session: Session, request: m.TakeTurn | m.PushTurn) -> ReadyTurn | None:
    """A turn that can be done in one call; None where it cannot be. Good until the next request or answer.

    Raises RemoteProtocolError.
    """
    send = session.answers.send
    if isinstance(request, m.PushTurn):
        pushed = _pushed(request)
        outlet = checked_outlet(session, pushed)
        offset = session.holdings.at(pushed.address, pushed.size_bytes).offset
        if pushed.size_bytes > INLINE_PUSH_BYTES or (offset | pushed.size_bytes) % F32_BYTES:
            return None
        send = partial(_send_on, session, outlet, outlet.head(pushed.sequence, pushed.size_bytes))
    graph, read, items = _taken_apart(session, request)
    if not (session.answers.are_sent and session.workload.may_block(graph.station)):
        return None
    if len(read.wishes) > MAX_PLANNED_BYTES:
        return None
    planned = _planned(session, graph, read, items)
    if planned is None:
        return None
    return ReadyTurn(session, planned, items, session.answer_room.take(planned.n_bytes), send)


def _taken_apart(session: Session, request: m.TakeTurn | m.PushTurn) -> tuple[Graph, m.ReadRows, memoryview]:
    """The graph to run, what is read of what it leaves, and the writes before it. A push is one whole row of floats."""
    graph = session.graphs.kept(request.device, request.graph_id)
    if isinstance(request, m.PushTurn):
        return graph, m.ReadRows(request.address, request.size_bytes // F32_BYTES, ONE_WHOLE_ROW), request.items
    wishes, items = request.tail[: request.wishes_bytes], request.tail[request.wishes_bytes :]
    if len(wishes) != request.wishes_bytes:
        raise RemoteProtocolError(f"TAKE_TURN: {request.wishes_bytes} bytes of wishes, {len(wishes)} are there")
    return graph, m.ReadRows(request.address, request.n_columns, wishes), items


def _pushed(request: m.PushTurn) -> m.Push:
    return m.Push(request.route, request.sequence, request.address, request.size_bytes)


def _send_on(session: Session, outlet: Outlet, head: bytes, answer: memoryview) -> None:
    has_left = outlet.send_behind(head, answer[ANSWER_HEADER.size :])
    session.answer(Command.PUSH_TURN, m.Value(int(has_left)))


def _planned(session: Session, graph: Graph, read: m.ReadRows, items: memoryview) -> PlannedTurn | None:
    key = (read.address, read.n_columns, bytes(read.wishes))
    turns: dict[object, PlannedTurn | None] = graph.turns
    if key not in turns:
        if len(turns) >= MAX_TURNS:
            turns.clear()
        turns[key] = _plan(session, graph, read, items)
    return turns[key]


def _plan(session: Session, graph: Graph, read: m.ReadRows, items: memoryview) -> PlannedTurn | None:
    """Only for writes into one buffer, which the graph uses as it does the one with the rows: so both live as long."""
    spot, rows = rows_at(session, read)
    if 0 < len(items) < BATCH_ITEM.size or rows.n_bytes > MAX_ANSWER_BYTES:
        return None
    address, size = BATCH_ITEM.unpack_from(items) if items else (read.address, 0)
    inputs = session.holdings.at(address, size)
    if not {inputs.buffer, spot.buffer} <= graph.buffers:
        return None
    base, device = address - inputs.offset, graph.station.device
    turn = device.prepare_turn(graph.handle, inputs.buffer, base, spot.buffer, spot.offset, rows)
    return None if turn is None else PlannedTurn(turn, rows.n_bytes)


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.TAKE_TURN: take_turn,
    Command.PUSH_TURN: push_turn,
}
