"""A real server on a real port, in a thread, and raw sockets to talk to it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from app.api.app import create_app
from app.api.half_close import HalfCloseProtocol
from app.api.options import ApiOptions
from tests.fakes.engine import FakeEngine

WAIT_S = 10.0


class LiveServer:
    """uvicorn over a fake engine."""

    def __init__(self, engine: FakeEngine, options: ApiOptions, loop: str) -> None:
        self.engine = engine
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        config = uvicorn.Config(
            create_app(engine, options),
            log_config=None,
            access_log=False,
            loop=loop,  # type: ignore[arg-type]
            http=HalfCloseProtocol,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._factory = config.get_loop_factory()
        self._thread = threading.Thread(target=self._run, name="live-server")

    def _run(self) -> None:
        async def main() -> None:
            self._ready.set()
            await self._server.serve(sockets=[self.listener])

        with asyncio.Runner(loop_factory=self._factory) as runner:
            runner.run(main())

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self.listener.close()

    def post(self, path: str, body: dict[str, Any]) -> RawExchange:
        return RawExchange(self.port, path, body)


@contextmanager
def live_server(
    engine: FakeEngine, options: ApiOptions | None = None, *, loop: str = "asyncio"
) -> Iterator[LiveServer]:
    server = LiveServer(engine, options or ApiOptions(), loop)
    server.start()
    try:
        yield server
    finally:
        engine.gate.open()
        server.stop()


class RawExchange:
    """One POST over a socket of its own, read as it comes."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)
        self.received = b""

    def read_until(self, mark: bytes) -> bytes:
        """Everything received so far, once it contains `mark`."""
        while mark not in self.received:
            data = self.socket.recv(65536)
            assert data, f"the connection ended before {mark!r}: {self.received!r}"
            self.received += data
        return self.received

    def read_all(self) -> bytes:
        """Everything until the server closes; then the socket is closed."""
        while data := self.socket.recv(65536):
            self.received += data
        self.socket.close()
        return self.received

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
