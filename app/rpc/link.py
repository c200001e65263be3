"""One connection and what is known about the state at its far end; shared by the devices that use it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from app.engine.program import Buffer
from app.errors import DeviceLost
from app.rpc.dispatcher import Dispatcher
from app.rpc.heartbeat import Heartbeat
from app.rpc.lower import Address
from app.rpc.messages import Request


class RpcBuffer(Buffer):
    """Memory at a worker. `address` is meaningful on its own connection only."""

    __slots__ = ("address", "frames", "link", "live")

    def __init__(self, device_name: str, size_bytes: int, link: Link, address: Address) -> None:
        super().__init__(device_name, size_bytes)
        self.link = link
        self.address = address
        self.live = True
        #: Encoded heads of small transfers by (offset, size): the same few repeat with every token.
        self.frames: dict[tuple[int, int], bytes] = {}


class Link:
    """A dispatcher, the graph that each device of the worker has stored for this connection, and who still uses it.

    `lock` makes "look at the bookkeeping, then submit" one step.
    """

    def __init__(self, dispatcher: Dispatcher, users: int) -> None:
        self.dispatcher = dispatcher
        self.heartbeat: Heartbeat | None = None
        self.peer = dispatcher.peer
        self.lock = threading.RLock()
        self.stored: dict[int, object] = {}
        #: Whether the worker pushes to others, and takes pushes.
        self.pushes = False
        #: Whether the worker looks through rows of logits.
        self.selects_rows = False
        #: Whether it does a decode step that comes as one request.
        self.takes_turns = False
        #: Whether it makes masks of their recipes.
        self.builds_masks = False
        #: What a Tandem worker calls its own process, whatever endpoint leads to it; "" if it does not say.
        self.identity = ""
        self._users = users
        self._next_graph_id = 1

    @property
    def endpoint(self) -> str:
        return self.dispatcher.endpoint

    def locate(self, buffer: Buffer) -> Address | None:
        """The address of a buffer of this connection; None for any other, whatever its numbers are."""
        return buffer.address if isinstance(buffer, RpcBuffer) and buffer.link is self and buffer.live else None

    def call(self, request: Request) -> Any:
        """One round trip. Raises DeviceLost."""
        future: Future[Any] = self.dispatcher.ask(request)
        return future.result()

    def new_graph_id(self) -> int:
        with self.lock:
            self._next_graph_id += 1
            return self._next_graph_id

    def leave(self) -> None:
        """One user less; the last one hangs up."""
        with self.lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.dispatcher.close()
            if self.heartbeat is not None:
                self.heartbeat.leave()

    def check(self) -> None:
        """Raises DeviceLost when the connection is gone."""
        if (lost := self.dispatcher.lost) is not None:
            raise DeviceLost(self.endpoint, lost.cause, command=lost.command) from lost
