"""Server-sent events: headers and a first comment at once, comments while it is quiet, errors inside the stream."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from json.encoder import encode_basestring as json_string  # the quoted JSON form of a str, made in C
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.direct import BODY_SEND
from app.api.errors import error_body, kind_of

log = logging.getLogger(__name__)

Emit = Callable[[bytes], Awaitable[None]]
Produce = Callable[[Emit], Awaitable[None]]

OPENING = b": tandem\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
#: Longest silence once the client has stopped sending: one that is gone refuses the second comment.
PROBE_S = 0.2
#: `no` keeps reverse proxies from collecting the stream before they pass it on.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

__all__ = ["DONE", "Emit", "EventStream", "json_string", "sse"]


def sse(payload: Mapping[str, Any], event: str | None = None) -> bytes:
    """One event; `event` is its name, in dialects whose events have one."""
    data = b"data: %b\n\n" % json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
    return data if event is None else b"event: %b\n%b" % (event.encode(), data)


def error_event(error: Exception) -> bytes:
    """An error as the events of OpenAI's chat tell it."""
    return sse(error_body(error))


class EventStream(Response):
    """A response whose events `produce` emits, whole events at a time, from one or more tasks.

    `on_end` is called once however it ends, also when the client goes away (`produce` is cancelled then). Everything
    that can be refused must have been refused before: from here on the status is 200 and an error is an event, made by
    `tell_error`. `keep_alive` breaks silences.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Produce,
        *,
        on_end: Callable[[], None],
        keepalive_s: float,
        keep_alive: bytes = KEEP_ALIVE,
        tell_error: Callable[[Exception], bytes] = error_event,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._produce = produce
        self._on_end = on_end
        self._keepalive_s = keepalive_s
        self._keep_alive = keep_alive
        self._tell_error = tell_error
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        send_body: Send = scope.get(BODY_SEND, send)

        async def emit(events: bytes) -> None:
            self._last_sent_s = clock()
            await send_body({"type": "http.response.body", "body": events, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await emit(OPENING)
            complete = await self._run(receive, emit, clock)
        finally:
            self._on_end()
        if complete:
            await send_body({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, receive: Receive, emit: Emit, clock: Callable[[], float]) -> bool:
        """Produce until done or until the client is gone; returns whether it is still there."""
        # A task of its own: an event then wakes this code, and not all the layers that called it.
        producer = asyncio.create_task(self._produce_or_tell(emit))
        watcher = asyncio.create_task(self._watch(receive, emit, clock, producer.cancel))
        try:
            await asyncio.wait((producer,))
        finally:
            producer.cancel()
            watcher.cancel()
        if producer.cancelled():
            return False
        producer.result()
        return True

    async def _produce_or_tell(self, emit: Emit) -> None:
        try:
            await self._produce(emit)
        except Exception as error:  # the status is sent; the stream is the only place left to say it
            if kind_of(error).status == 500:
                log.error("stream failed by a bug", exc_info=error)
            await emit(self._tell_error(error))

    async def _watch(
        self, receive: Receive, emit: Emit, clock: Callable[[], float], on_disconnect: Callable[[], object]
    ) -> None:
        """Break silences with comments until the client is gone."""
        silence_s = self._keepalive_s
        while True:
            try:
                async with asyncio.timeout_at(self._last_sent_s + silence_s):
                    if (await receive())["type"] == "http.disconnect":
                        on_disconnect()
                        return
                    silence_s = min(silence_s, PROBE_S)  # its sending side ended: is it still there?
            except TimeoutError:
                if clock() - self._last_sent_s >= silence_s:
                    await emit(self._keep_alive)
