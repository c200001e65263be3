"""A short way out for the events of a stream."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

#: Where in the scope the server's own `send` is.
BODY_SEND = "tandem.body_send"


class DirectSend:
    """Notes the server's `send`, outside of all other layers.

    They look at the start of an answer only and pass its body through, yet each of them costs as much per event as
    writing it. So the start of a stream goes through all of them, and its events past them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[BODY_SEND] = send
        await self._app(scope, receive, send)
