"""Bytes that are no HTTP, or too much of it: an error in the envelope, and the end of the connection."""

from __future__ import annotations

import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.api.errors import Kind, envelope

#: Bytes that may come without a whole head, a piece of a body or its end among them. The parser itself knows no bound.
MAX_HEAD_BYTES = 256 << 10
BAD = Kind(400, "invalid_request_error", "invalid_http")
TOO_LARGE = Kind(431, "invalid_request_error", "headers_too_large")


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, but what comes before and after a body is bounded, and refused in our words."""

    _n_events = 0
    _unheard_bytes = 0

    def data_received(self, data: bytes) -> None:
        n_events = self._n_events
        super().data_received(data)
        self._unheard_bytes = self._unheard_bytes + len(data) if n_events == self._n_events else 0
        if self._unheard_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(TOO_LARGE, f"the headers are larger than {MAX_HEAD_BYTES} bytes; send fewer or shorter ones")

    def send_400_response(self, msg: str) -> None:
        self._refuse(BAD, "this is no HTTP/1.1 request, or a broken one; check its first line, headers and framing")

    def _refuse(self, kind: Kind, message: str) -> None:
        """Answer, unless another answer is on its way already, and close."""
        cycle = self.cycle
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            body = json.dumps(envelope(message, kind)).encode()
            head = (
                f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        self._n_events += 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._n_events += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._n_events += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._n_events += 1
        super().on_message_complete()
