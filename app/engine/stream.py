"""The bridge from the engine's thread to the event loop: one stream of events per request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from app.engine.request import Embedded, Event, Finished


class EventStream:
    """Events of one request, put in by the engine, taken out by a route. Made on the loop that will read it."""

    def __init__(self, request_id: str, on_abort: Callable[[str], object]) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._on_abort = on_abort
        self._items: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    def put(self, item: Event | BaseException) -> None:
        """Add an event, or the error that ends the stream. On the loop only; `Outbox` gets there."""
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            item = await self._items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if isinstance(item, Finished | Embedded):
                return

    def abort(self) -> None:
        self._on_abort(self.request_id)


class Outbox:
    """Collects a step's events and hands them over with one wake-up per event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.AbstractEventLoop, list[tuple[EventStream, Event | BaseException]]] = {}

    def put(self, stream: EventStream, item: Event | BaseException) -> None:
        self._waiting.setdefault(stream.loop, []).append((stream, item))

    def flush(self) -> None:
        """Deliver everything. A loop that has closed has no readers left; its events are dropped with it."""
        waiting, self._waiting = self._waiting, {}
        for loop, items in waiting.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, items)


def _deliver(items: Iterable[tuple[EventStream, Event | BaseException]]) -> None:
    for stream, item in items:
        stream.put(item)
