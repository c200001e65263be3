"""The outermost layer of ours: request ids, one log line per request, and an answer even to a bug."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import logs
from app.api.anthropic import errors as anthropic
from app.api.auth import PUBLIC_PATHS
from app.api.errors import error_response

log = logging.getLogger(__name__)

HEADER = "x-request-id"
MAX_ID_CHARS = 128


def request_id(scope: Scope) -> str:
    """The id the client gave, if it can stand in a header and a log line; else a fresh one."""
    for name, value in scope["headers"]:
        if name == HEADER.encode():
            given: str = value.decode("latin-1")
            if given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_CHARS:
                return given
    return f"req_{uuid.uuid4().hex}"


class Edge:
    """Wraps the whole app. Websockets are refused with an HTTP answer, so that clients that try one fall back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(scope, send)
        elif scope["type"] == "http":
            identifier = request_id(scope)
            with logs.for_request(identifier):
                await self._answer(scope, receive, send, identifier)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, identifier: str) -> None:
        start_s, status = time.monotonic(), 0
        names = (HEADER, anthropic.ID_HEADER) if scope["path"].startswith(anthropic.PATH) else (HEADER,)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name in names:
                    MutableHeaders(scope=message)[name] = identifier
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # whatever it is, the client gets an answer and the log gets the traceback
            if status:
                log.error("an answer broke off by a bug", exc_info=error)
                raise
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in PUBLIC_PATHS else logging.INFO
            elapsed_ms = round(1e3 * (time.monotonic() - start_s), 1)
            log.log(level, "%s %s", scope["method"], scope["path"], extra={"status": status, "ms": elapsed_ms})


async def refuse_websocket(scope: Scope, send: Send) -> None:
    """404 where the server can say it, a refused handshake (403) elsewhere."""
    if "websocket.http.response" in scope.get("extensions", {}):
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": b"no websockets here; use HTTP"})
    else:
        await send({"type": "websocket.close", "code": 1000})
