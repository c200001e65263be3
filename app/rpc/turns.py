"""A decode step as one request: small writes, a kept graph, and a read or a push of what it leaves.

Where the device is idle and can, it does all of it in one call. What a session's thread would do in between is little,
but computing has driven it from this machine's caches: every line of Python there takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.engine.device import Turn
from app.engine.rows import F32_BYTES, WHOLE, RowSelection
from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.computing import start
from app.rpc.graphs import Graph
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


def take_turn(session: Session, request: m.TakeTurn) -> None:
    wishes, items = request.tail[: request.wishes_bytes], request.tail[request.wishes_bytes :]
    if len(wishes) != request.wishes_bytes:
        raise RemoteProtocolError(f"TAKE_TURN: {request.wishes_bytes} bytes of wishes, {len(wishes)} are there")
    graph = session.graphs.kept(request.device, request.graph_id)
    read = m.ReadRows(request.address, request.n_columns, wishes)
    if (answer := _taken(session, graph, read, items)) is not None:
        session.answers.send(answer)
        return
    spot, rows = rows_at(session, read)
    write_items(session, items)
    start(session, graph)
    send_rows(session, spot, rows)


def push_turn(session: Session, request: m.PushTurn) -> None:
    graph = session.graphs.kept(request.device, request.graph_id)
    pushed = m.Push(request.route, request.sequence, request.address, request.size_bytes)
    outlet = checked_outlet(session, pushed)
    offset = session.holdings.at(pushed.address, pushed.size_bytes).offset
    if pushed.size_bytes <= INLINE_PUSH_BYTES and (offset | pushed.size_bytes) % F32_BYTES == 0:
        read = m.ReadRows(pushed.address, pushed.size_bytes // F32_BYTES, ONE_WHOLE_ROW)
        if (answer := _taken(session, graph, read, request.items)) is not None:
            has_left = outlet.send(pushed.sequence, answer[ANSWER_HEADER.size :])
            session.answer(request.command, m.Value(int(has_left)))
            return
    write_items(session, request.items)
    start(session, graph)
    push(session, pushed)


def _taken(session: Session, graph: Graph, read: m.ReadRows, items: memoryview) -> memoryview | None:
    """The whole answer to a read behind writes and a run, done in one call; None, and nothing done, where it cannot be.

    Good until the next one.
    """
    if not (session.answers.are_sent and session.workload.may_block(graph.station)):
        return None
    if len(read.wishes) > MAX_PLANNED_BYTES:
        return None
    planned = _planned(session, graph, read, items)
    if planned is None:
        return None
    answer = session.answer_room.take(planned.n_bytes)
    if not planned.turn.run(items, answer[ANSWER_HEADER.size :]):
        return None
    session.check()  # a run before may have failed just now
    return answer


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
