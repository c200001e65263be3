"""A small real HTTP server on a free port, for clients under test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


@contextmanager
def http_server(answer: Answer) -> Iterator[str]:
    """Yields the base URL. `answer` gets each request (GET and POST) with its body and writes the response."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            answer(self, self.rfile.read(int(self.headers.get("content-length", 0))))

        do_GET = do_POST = _answer

        def log_message(self, *args: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """A whole response; underscores in header names stand for dashes."""
    handler.send_response(status)
    for name, value in {"content_length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)
