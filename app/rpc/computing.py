"""A client's graphs: kept, run, dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from app.errors import DeviceError, InternalError
from app.rpc import messages as m
from app.rpc.graphs import Graph
from app.rpc.specs import MAX_TEXT_ANSWER_BYTES
from app.rpc.wire import Command

if TYPE_CHECKING:
    from app.rpc.session import Session

log = logging.getLogger(__name__)


def graph_compute(session: Session, request: m.GraphCompute) -> None:
    _run(session, session.graphs.compute(request.device, request.graph))


def graph_recompute(session: Session, request: m.GraphRecompute) -> None:
    _run(session, session.graphs.last(request.device))


def graph_store(session: Session, request: m.GraphStore) -> None:
    try:
        session.graphs.keep(request.device, request.graph_id, request.graph)
        reason = b""
    except DeviceError as error:
        reason = str(error).encode()[:MAX_TEXT_ANSWER_BYTES]
    session.answer_text(reason)


def graph_run(session: Session, request: m.GraphRun) -> None:
    _run(session, session.graphs.kept(request.device, request.graph_id))


def graph_drop(session: Session, request: m.GraphDrop) -> None:
    session.graphs.drop(request.device, request.graph_id)


def _run(session: Session, graph: Graph) -> None:
    go_on = session.look_ahead()
    start(session, graph)
    go_on()


def start(session: Session, graph: Graph) -> None:
    """Run a graph. One that failed has no answer that could say so: the session ends."""

    def ran(event: Future[None]) -> None:
        if (error := event.exception()) is not None:
            if isinstance(error, InternalError):
                log.error("a bug in this worker ended a graph of client %s", session.client, exc_info=error)
            session.fail(f"a graph failed: {error}")

    session.workload.run(graph).add_done_callback(ran)
    session.check()


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.GRAPH_COMPUTE: graph_compute,
    Command.GRAPH_RECOMPUTE: graph_recompute,
    Command.GRAPH_STORE: graph_store,
    Command.GRAPH_RUN: graph_run,
    Command.GRAPH_DROP: graph_drop,
}
