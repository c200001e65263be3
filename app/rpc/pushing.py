"""Pushes from one worker to another: what a client asks of both ends, and what a sender says to a receiver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from app.errors import RemoteProtocolError, TandemError
from app.rpc import messages as m
from app.rpc.answers import STAGING_BYTES
from app.rpc.inlets import Inlet, Inlets
from app.rpc.outlets import Outlet
from app.rpc.wire import Command

if TYPE_CHECKING:
    from app.rpc.session import Session

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Routes that one client may have open in each direction.
MAX_ROUTES = 16

#: A longer push would not find a place to wait in.
MAX_PUSH_BYTES = STAGING_BYTES

#: Pushes up to this size leave in the session's own thread when nothing is being computed: a socket takes them at once.
INLINE_PUSH_BYTES = 256 << 10

MAX_ENDPOINT_BYTES = 300


class Routes:
    """The ends of routes that one client has opened on this worker."""

    def __init__(self, inlets: Inlets) -> None:
        self._inlets = inlets
        self._incoming: dict[int, Inlet] = {}
        self._outgoing: dict[int, Outlet] = {}

    @property
    def has_incoming(self) -> bool:
        return bool(self._incoming)

    def accept(self, route: int) -> Inlet:
        """A new incoming route; an older one of this number is closed."""
        if (old := self._incoming.pop(route, None)) is not None:
            self._inlets.drop(old)
        self._check_room(self._incoming)
        inlet = self._incoming[route] = self._inlets.new()
        return inlet

    def close_outgoing(self, route: int) -> None:
        if (old := self._outgoing.pop(route, None)) is not None:
            old.close()
        self._check_room(self._outgoing)

    def open(self, route: int, outlet: Outlet) -> None:
        self._outgoing[route] = outlet

    def incoming(self, route: int) -> Inlet:
        return _known(self._incoming, route)

    def outgoing(self, route: int) -> Outlet:
        return _known(self._outgoing, route)

    def close(self) -> None:
        """Close everything; wakes whoever waits on the other ends."""
        for inlet in self._incoming.values():
            self._inlets.drop(inlet)
        for outlet in self._outgoing.values():
            outlet.close()
        self._incoming.clear()
        self._outgoing.clear()

    @staticmethod
    def _check_room(routes: Mapping[int, Any]) -> None:
        if len(routes) >= MAX_ROUTES:
            raise RemoteProtocolError(f"more than {MAX_ROUTES} routes for pushes in one direction")


def _known(routes: Mapping[int, T], route: int) -> T:
    if route not in routes:
        raise RemoteProtocolError(f"route {route} for pushes was never opened")
    return routes[route]


# -- opening a route --------------------------------------------------------------------------------------------------


def push_accept(session: Session, request: m.PushAccept) -> None:
    session.answer(request.command, m.Ticket(session.routes.accept(request.route).ticket))


def push_connect(session: Session, request: m.PushConnect) -> None:
    if len(request.endpoint) > MAX_ENDPOINT_BYTES:
        raise RemoteProtocolError(f"an endpoint of {len(request.endpoint)} bytes makes no sense")
    endpoint = bytes(request.endpoint).decode(errors="replace")
    session.routes.close_outgoing(request.route)
    reason = b""
    try:
        outlet = Outlet.open(endpoint, request.ticket, session.worker.settings.token)
    except (TandemError, EOFError, OSError) as error:
        reason = (str(error) or "it hung up").encode()
    else:
        session.routes.open(request.route, outlet)
    session.answer_text(reason)


def push_attach(session: Session, request: m.PushAttach) -> None:
    """The connection is another session's from now on. One that takes pushes itself cannot bring any."""
    if session.routes.has_incoming:
        raise RemoteProtocolError("PUSH_ATTACH came on a connection that takes pushes itself")
    inlet = session.worker.inlets.attach(request.ticket, session.socket)
    try:
        session.answer(request.command, m.Value(1))
        inlet.wait()
    finally:
        inlet.close()
    raise EOFError("no more pushes are taken")


def push_data(session: Session, request: m.PushData) -> None:
    raise RemoteProtocolError(f"{request.command.name} came on a connection that has not handed in a ticket")


# -- using it ---------------------------------------------------------------------------------------------------------


def checked_outlet(session: Session, request: m.Push) -> Outlet:
    """Where a push is to go. Raises RemoteProtocolError for one that makes no sense."""
    checked_size(request.size_bytes)
    return session.routes.outgoing(request.route)


def push(session: Session, request: m.Push) -> None:
    """Sent when everything before is done, while the device computes what comes next."""
    outlet = checked_outlet(session, request)
    size = request.size_bytes
    spot = session.holdings.at(request.address, size)
    computing = session.workload.is_computing(spot.station)
    if (computing or size > INLINE_PUSH_BYTES) and (staged := session.staging.take(size)) is not None:

        def send() -> Sequence[bytes]:
            return (session.encode(request.command, m.Value(int(outlet.send(request.sequence, staged)))),)

        ready = spot.station.device.read(spot.buffer, spot.offset, size, staged)
        session.answers.make_later(ready, send, then=lambda: session.staging.give(staged))
        return
    session.answers.drain()
    session.check()
    view = session.workload.host_view(spot, size)
    if view is None:
        view = spot.station.device.read(spot.buffer, spot.offset, size).result()
        session.workload.seen(spot.station)
    session.answer(request.command, m.Value(int(outlet.send(request.sequence, view))))


def checked_size(size_bytes: int) -> int:
    """The size of a push. Raises RemoteProtocolError."""
    if not 0 < size_bytes <= MAX_PUSH_BYTES:
        raise RemoteProtocolError(f"a push of {size_bytes} bytes, allowed are 1 to {MAX_PUSH_BYTES}")
    return size_bytes


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    Command.PUSH_ACCEPT: push_accept,
    Command.PUSH_CONNECT: push_connect,
    Command.PUSH_ATTACH: push_attach,
    Command.PUSH_DATA: push_data,
    Command.PUSH: push,
}
