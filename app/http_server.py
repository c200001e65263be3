"""Runs an ASGI app on a socket until it is told to stop; signals drain, and a port in use is one clear line."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from app.errors import TandemError

#: Seconds that open connections get to finish when the server is asked to stop.
DRAIN_S = 30
_BACKLOG = 2048


class ListenError(TandemError):
    """The address cannot be listened on."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises ListenError naming the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}: {error.strerror or error}; check --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def url_of(listener: socket.socket) -> str:
    """The URL a person on this machine would open."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
    """One app on one socket. `run` blocks until a signal or `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=DRAIN_S,
                timeout_keep_alive=75,
            )
        )

    def run(self, on_start: Callable[[], None] | None = None) -> None:
        """Serve until stopped; `on_start` is called on the loop's thread before the first request."""

        async def main() -> None:
            if on_start is not None:
                on_start()
            await self._server.serve(sockets=[self._listener])

        asyncio.run(main())

    def stop(self) -> None:
        """Ask the server to drain and return from `run`. From any thread."""
        self._server.should_exit = True
