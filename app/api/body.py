"""Reads request bodies: bounded, as JSON whatever their content type says, and strictly JSON at that."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.long_json import parse_long

#: Longer bodies are read beside the event loop: at once, they would hold it for more than a few milliseconds.
AT_ONCE_BYTES = 1 << 20
#: How much of a refused body is read and dropped, and for how long, so that its sender gets to reading the answer.
DROP_BYTES, DROP_S = 256 << 20, 10.0


def parse_json(body: bytes) -> Any:
    """Parse UTF-8 JSON (a byte order mark is forgiven). NaN, lone surrogates and nesting beyond 200 are not JSON here.

    Raises json.JSONDecodeError. A repeated key's last value counts.
    """
    try:
        return from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise json.JSONDecodeError(_why(str(error)), "", 0) from None


def _why(reason: str) -> str:
    """The parser's reason, in words that say what to look for where its own do not."""
    if "hex escape" in reason or "surrogate" in reason:
        return f"{reason}: perhaps half of a surrogate pair, from text that was cut within a character"
    return reason


class JsonRequest(Request):
    """A request whose `json` is `parse_json` and whose body is bounded."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit = self.app.state.api.options.limits.body_bytes
            announced = self.headers.get("content-length", "")
            if announced.isdecimal() and int(announced) > limit:
                raise TooLarge(limit, has_rest=True)
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                if size > limit:
                    raise TooLarge(limit, has_rest=not self._stream_consumed)
                chunks.append(chunk)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= AT_ONCE_BYTES:
            return parse_json(body)
        return await anyio.to_thread.run_sync(parse_long, body, limiter=self.app.state.api.threads)


class TooLarge(HTTPException):
    """A body above the limit. `has_rest`: not all of it was read.

    The framework passes only its own exception through while it reads a body.
    """

    def __init__(self, limit_bytes: int, *, has_rest: bool) -> None:
        super().__init__(413, f"the body is larger than {limit_bytes} bytes", {"Connection": "close"})
        self.has_rest = has_rest


class EarlyAnswer(JSONResponse):
    """Sent while the body still arrives, whose rest is read and dropped, up to a bound.

    Closing a connection with bytes unread resets it, and clients that send first and read then lose the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, body = self.raw_headers, bytes(self.body)
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with anyio.move_on_after(DROP_S):
            dropped, more = 0, True
            while more and dropped < DROP_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class JsonRoute(APIRoute):
    """A route that reads its body through `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


class AnyContentType:
    """Calls every body `application/json`: curl's -d says it is a form, and some clients say nothing at all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
        await self._app(scope, receive, send)
