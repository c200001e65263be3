"""Runs an ASGI app on a socket until it is told to stop; signals drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

#: Seconds that open connections get to finish when the server is asked to stop.
DRAIN_S = 30


class _Server(uvicorn.Server):
    """uvicorn, but signals only ask it to stop; they are not raised again afterwards, so a stop is exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


class HttpServer:
    """One app on one socket, over the HTTP/1.1 `protocol` it wants. `run` blocks until a signal or `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, protocol: type[asyncio.Protocol]) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                http=protocol,
                timeout_graceful_shutdown=DRAIN_S,
                timeout_keep_alive=75,
            )
        )

    def run(self) -> None:
        """Serve until stopped; at once over if it was stopped before."""
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """Ask the server to drain and return from `run`. From any thread."""
        self._server.should_exit = True
