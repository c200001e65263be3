"""The client's view of pushes: a route from one Tandem worker to another, and what is asked of both ends of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from app.engine.program import Buffer
from app.engine.route import Departure, Route
from app.errors import RouteLost
from app.rpc.link import Link
from app.rpc.messages import Push, PushAccept, PushConnect, PushTake, Ticket, Value
from app.rpc.outbox import settle
from app.rpc.sender import Sender
from app.rpc.transfers import chunks

log = logging.getLogger(__name__)

#: Every device has a connection of its own, from which one route leads away and to which one leads.
ROUTE = 0

#: Longer boundaries are pushed in pieces: a worker keeps a push in memory until it has left.
PIECE_BYTES = 32 << 20

#: So long after a push has failed it is certain which worker has died, if one has: its end of all connections closes
#: with it, but who hears of which first is chance.
BLAME_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class RouteEnd:
    """A device as a route sees it. `address` gives a checked range of a buffer as its worker names it."""

    name: str
    link: Link
    sender: Sender
    address: Callable[[Buffer, int, int], int]


def open_route(source: RouteEnd, target: RouteEnd) -> RpcRoute | None:
    """Have two workers connect, and try it; None, with one line in the log, where they cannot. Blocks.

    Raises DeviceLost when one of them is lost meanwhile.
    """
    ticket: Ticket = target.link.call(PushAccept(ROUTE))
    endpoint = memoryview(target.link.endpoint.encode())
    connected = source.sender.ask(PushConnect(ROUTE, ticket.ticket, endpoint), endpoint)
    if reason := bytes(connected.result()).decode(errors="replace"):
        log.warning("boundaries from %s to %s go through this server: %s", source.name, target.name, reason)
        return None
    log.info("boundaries go from %s straight to %s", source.name, target.name)
    return RpcRoute(source, target)


class RpcRoute(Route):
    """An open route. The receiver is told of a push once the sender's command has left, so that it never waits in
    vain: a command that is never sent because of what failed before it fails the receiver's as well, on this side.
    """

    def __init__(self, source: RouteEnd, target: RouteEnd) -> None:
        self._source = source
        self._target = target
        self._failed = False
        self._sequence = 0

    @property
    def is_open(self) -> bool:
        ends = (self._source, self._target)
        return not self._failed and all(end.link.dispatcher.lost is None for end in ends)

    def push(self, source: Buffer, offset: int, size_bytes: int) -> Departure:
        return RpcDeparture([self._push(source, offset + at, n) for at, n in chunks(size_bytes, PIECE_BYTES)])

    def _push(self, source: Buffer, offset: int, n: int) -> Piece:
        address = self._source.address(source, offset, n)
        sent: Future[None] = Future()
        self._sequence += 1
        request = Push(ROUTE, self._sequence, address, n)
        left = self._proved(self._source.sender.push(request, sent))
        return Piece(self, self._sequence, n, sent, left)

    def take(self, piece: Piece, target: Buffer, offset: int) -> Future[float]:
        address = self._target.address(target, offset, piece.n_bytes)
        request = PushTake(ROUTE, piece.sequence, address, piece.n_bytes)
        return self._proved(self._target.sender.ask_in_lane(request, gate=piece.sent))

    def _proved(self, answer: Future[Value]) -> Future[float]:
        """Fails if the answer is that the route has failed. Its value is how old the answer is, in seconds."""
        proved: Future[float] = Future()

        def answered(answer: Future[Value]) -> None:
            error, age_s = answer.exception(), 0.0
            if error is None and answer.result().value:
                age_s = (answer.result().value - 1) / 1e6
            elif error is None:
                self._failed = True
                self._blame(proved)
                return
            settle(proved, age_s, error=error)

        answer.add_done_callback(answered)
        return proved

    def _blame(self, proved: Future[float]) -> None:
        """Fail with what was lost: a worker, of which its own connection tells about now; else the route alone."""

        def fail() -> None:
            ends = (self._source.link.dispatcher, self._target.link.dispatcher)
            died = next((end.lost for end in ends if end.lost is not None), None)
            settle(proved, error=died or RouteLost(*(end.endpoint for end in ends)))

        timer = threading.Timer(BLAME_AFTER_S, fail)
        timer.daemon = True
        timer.start()


@dataclass(frozen=True, slots=True)
class Piece:
    """One push. `sent`: the sender's command is on its way; `left`: the bytes are."""

    route: RpcRoute
    sequence: int
    n_bytes: int
    sent: Future[None]
    left: Future[Any]


class RpcDeparture(Departure):
    """Pushes in a row. A route that has failed stays so: the last one has gone well only if all have."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.left = pieces[-1].left

    def arrive(self, target: Buffer, offset: int) -> Future[float]:
        for piece in self.pieces:
            arrived = piece.route.take(piece, target, offset)
            offset += piece.n_bytes
        return arrived
