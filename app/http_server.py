"""Runs an ASGI app on a socket until it is told to stop; signals drain.

At the first signal the service behind the app gets `DRAIN_S` seconds for what is running, at the second none: it ends
its streams with an error of their own, and only then are connections closed. A third signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

#: Seconds that running requests get to finish when the server is asked to stop.
DRAIN_S = 25.0
#: Seconds connections get after that, to write what they hold.
_CLOSE_S = 5


class _Server(uvicorn.Server):
    """uvicorn, but signals only ask it to stop; they are not raised again afterwards, so a stop is exit code 0."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[float], None]) -> None:
        super().__init__(config)
        self._drain = drain
        self._n_signals = 0

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
        self._n_signals += 1
        if self._n_signals > 2:
            self.force_exit = True
            return
        self.should_exit = True
        drain_s = DRAIN_S if self._n_signals == 1 else 0.0
        threading.Thread(target=self._drain, args=(drain_s,), name="drain", daemon=True).start()


class HttpServer:
    """One app on one socket, over the HTTP/1.1 `protocol` it wants. `run` blocks until a signal or `stop`.

    `drain(seconds)` is called on a thread of its own when a signal came; it may block.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        protocol: type[asyncio.Protocol],
        drain: Callable[[float], None],
    ) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                http=protocol,
                timeout_graceful_shutdown=int(DRAIN_S) + _CLOSE_S,
                timeout_keep_alive=75,
            ),
            drain,
        )

    def run(self) -> None:
        """Serve until stopped; at once over if it was stopped before."""
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """Ask the server to drain and return from `run`. From any thread."""
        self._server.should_exit = True
