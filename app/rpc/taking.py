"""Taking pushes from other workers, and going on with a turn the moment one is there.

Between two workers a decode step is a push and a turn behind it. The turn has come long before the push: all that can
be checked and planned is, and then the push is received where it belongs and computed with, with as little between as
there can be. For this machine's caches are another's by then, and its core has gone to sleep.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from app.errors import RemoteProtocolError
from app.rpc import messages as m
from app.rpc.inlets import Inlet
from app.rpc.pushing import checked_size
from app.rpc.receiving import OVERLAP_BYTES, receive
from app.rpc.turns import ReadyTurn, ready_turn
from app.rpc.wire import ANSWER_HEADER, U32_MAX, Command

if TYPE_CHECKING:
    from app.rpc.session import Session

log = logging.getLogger(__name__)

#: Microseconds and one, behind the header of an answer.
_AGE = struct.Struct("<I")


def push_take(session: Session, request: m.PushTake) -> None:
    """Whatever was asked later waits for this push: it may need it. A failed route does not end the session.

    If a turn comes next, its result is what the client waits for, and the answer to a short push leaves with it.
    """
    inlet = session.routes.incoming(request.route)
    size = checked_size(request.size_bytes)
    spot = session.holdings.at(request.address, size)
    following = session.peek() if size < OVERLAP_BYTES else None
    turn = following if isinstance(following, m.TakeTurn | m.PushTurn) else None
    ready = None if turn is None else _ready(session, turn)
    view = None if ready is None else session.workload.host_view(spot, size)
    answer = bytearray(session.encode(request.command, m.Value(0)))
    has_come = True
    try:
        if view is None or not inlet.take_at_once(request.sequence, view, session.socket):
            receive(session, inlet.next(request.sequence, size, session.socket), spot, size)
    except (EOFError, OSError, RemoteProtocolError) as error:
        has_come = False
        _give_up(session, request, inlet, error)
    answered = partial(_with_age, answer, time.monotonic() if has_come else None)
    if turn is None:
        session.answers.send(answered())
        return
    session.answers.hold(answered)
    if ready is not None and has_come and ready.run():
        session.skip_following()


def _ready(session: Session, turn: m.TakeTurn | m.PushTurn) -> ReadyTurn | None:
    """The turn behind a push, if all that is left of it is to be run; what is wrong with it, it is told in its turn."""
    try:
        session.trust.check(turn.command)
        return ready_turn(session, turn)
    except RemoteProtocolError:
        return None


def _give_up(session: Session, request: m.PushTake, inlet: Inlet, error: Exception) -> None:
    log.warning("push %d to client %s will not come: %s", request.sequence, session.client, error)
    inlet.close()


def _with_age(answer: bytearray, arrived_s: float | None) -> bytearray:
    """The answer, which says how long ago the push came; 0 if it has not."""
    age_us = -1 if arrived_s is None else int((time.monotonic() - arrived_s) * 1e6)
    _AGE.pack_into(answer, ANSWER_HEADER.size, min(age_us + 1, U32_MAX))
    return answer


HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {Command.PUSH_TAKE: push_take}
