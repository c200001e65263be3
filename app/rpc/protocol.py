"""Both ends of one connection as pure state: bytes in, messages out. No sockets, no threads.

An I/O shell receives into `space()`, reports with `received()`, and asks for messages until there are none. Bulk data
passes the parser by: after a message that streams, `payload_left` says how many bytes belong to it; the shell takes
what is already buffered with `take_payload()`, receives the rest wherever it likes and reports it with `passed()`.
After a protocol error a parser refuses everything.
"""

from __future__ import annotations

from typing import Any

from app.errors import LocalProtocolError, RemoteProtocolError
from app.rpc.messages import Request
from app.rpc.specs import SPECS, Layout, Spec, Specs, check_request_size
from app.rpc.wire import (
    ANSWER_HEADER,
    ERROR_NOTICE,
    ERROR_NOTICE_LENGTH,
    MAX_ERROR_NOTICE_BYTES,
    REQUEST_HEADER,
    Command,
)

#: Bounds every request but the bulk data of SET_TENSOR: a graph of 200,000 tensors fits.
MAX_MESSAGE_BYTES = 64 << 20

_FIRST_BYTES = 4096
_KEEP_BYTES = 1 << 20
_COMMANDS = {int(command): command for command in Command}


def encode(request: Request, version: tuple[int, int], payload_bytes: int = 0) -> bytes:
    """The bytes of a request before its tail or bulk data, which must be sent right behind (`payload_bytes` in all)."""
    layout = SPECS[version][request.command].request
    return REQUEST_HEADER.pack(request.command, layout.fixed_bytes + payload_bytes) + layout.pack(request)


def encode_answer(layout: Layout, answer: Any) -> bytes:
    """A whole answer of fixed size."""
    return ANSWER_HEADER.pack(layout.fixed_bytes) + layout.pack(answer)


def encode_error_notice(reason: str) -> bytes:
    """The last words of a Tandem worker to a client that understands them."""
    text = reason.encode()[:MAX_ERROR_NOTICE_BYTES]
    return ANSWER_HEADER.pack(ERROR_NOTICE) + ERROR_NOTICE_LENGTH.pack(len(text)) + text


class _Parser:
    """What both roles share: received bytes that are not understood yet, payload that passes by, and poisoning.

    Memory grows as bytes arrive, never on an announced size. Views of it are handed out and valid until `space`.
    """

    def __init__(self) -> None:
        self._memory = bytearray(_FIRST_BYTES)
        self._view = memoryview(self._memory)
        self._start = 0
        self._end = 0
        self._error: RemoteProtocolError | None = None
        self.payload_left = 0

    def space(self) -> memoryview:
        """Where to receive the next bytes. Valid until the next call; views given out before are not valid any more."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._memory) > _KEEP_BYTES:
                self._move_to(bytearray(_FIRST_BYTES))
        elif self._end == len(self._memory):
            held = self._end - self._start
            size = len(self._memory)
            self._move_to(bytearray(size * 2 if held * 2 > size else size))
        return self._view[self._end :]

    def _move_to(self, memory: bytearray) -> None:
        held = self._end - self._start
        memory[:held] = self._view[self._start : self._end]
        self._memory, self._view = memory, memoryview(memory)
        self._start, self._end = 0, held

    def received(self, n: int) -> None:
        """`n` bytes were put into `space()`."""
        self._end += n

    def feed(self, data: bytes | memoryview) -> None:
        """Copy bytes in; for callers that have them already."""
        view = memoryview(data)
        while view:
            space = self.space()
            n = min(len(space), len(view))
            space[:n] = view[:n]
            self.received(n)
            view = view[n:]

    @property
    def buffered(self) -> int:
        """Bytes received but not understood yet."""
        return self._end - self._start

    def take_payload(self, most: int) -> memoryview:
        """Payload bytes that were received together with the header, at most `most`; empty when there are none."""
        n = min(most, self.payload_left, self._end - self._start)
        self.payload_left -= n
        return self._take(n)

    def passed(self, n: int) -> None:
        """`n` payload bytes went from the socket straight to their place."""
        if n > self.payload_left or self.buffered:
            raise LocalProtocolError(f"{n} payload bytes passed by, but {self.payload_left} were due")
        self.payload_left -= n

    def _take(self, n: int) -> memoryview:
        start = self._start
        self._start = start + n
        return self._view[start : start + n]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.payload_left:
            raise LocalProtocolError(f"{self.payload_left} payload bytes must be taken first")

    def _refuse(self, message: str) -> RemoteProtocolError:
        self._error = RemoteProtocolError(message)
        return self._error


class RequestParser(_Parser):
    """The worker's side: turns a client's bytes into requests.

    `version` decides the shape of SET_TENSOR. HELLO must come first and once. Extensions are understood always:
    clients send them only to a worker that announced itself.
    """

    def __init__(self, version: tuple[int, int], max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__()
        self._specs: Specs = SPECS[version]
        self.max_message_bytes = max_message_bytes
        self.greeted = False
        self._spec: Spec | None = None
        self._size = 0

    def next_request(self) -> Request | None:
        """The next request, or None when more bytes are needed. Raises RemoteProtocolError.

        The message may hold views that are valid until the next call of `space`.
        """
        if self._error is not None or self.payload_left:
            self._check()
        spec = self._spec
        if spec is None:
            spec = self._read_header()
            if spec is None:
                return None
        wanted = spec.request.fixed_bytes if spec.streams else self._size
        if self._end - self._start < wanted:
            return None
        self._spec = None
        self.payload_left = self._size - wanted
        request: Request = spec.request.unpack(self._take(wanted))
        return request

    @property
    def mid_request(self) -> bool:
        """Whether a request has begun to arrive and is not complete."""
        return self._spec is not None or self.buffered > 0 or self.payload_left > 0

    def _read_header(self) -> Spec | None:
        """Take a header and check it, as soon as it is there; the very first byte is looked at before that."""
        start = self._start
        if start == self._end:
            return None
        number = self._view[start]
        if number not in _COMMANDS or (number == Command.HELLO) == self.greeted:
            self._check_command(number)
        if self._end - start < REQUEST_HEADER.size:
            return None
        (_, size) = REQUEST_HEADER.unpack_from(self._view, start)
        self._start = start + REQUEST_HEADER.size
        spec = self._specs[_COMMANDS[number]]
        fixed = spec.request.fixed_bytes
        if size != fixed:
            try:
                check_request_size(spec, _COMMANDS[number], size, self.max_message_bytes)
            except RemoteProtocolError as error:
                raise self._refuse(str(error)) from None
        self.greeted = True
        self._spec, self._size = spec, size
        return spec

    def _check_command(self, number: int) -> None:
        """Refuse on the very first byte: whoever speaks HTTP or TLS to this port shall know at once."""
        if number not in _COMMANDS:
            raise self._refuse(f"unknown command {number}; this port speaks ggml RPC")
        if (number == Command.HELLO) == self.greeted:
            wrong = "HELLO was sent twice" if self.greeted else f"{_COMMANDS[number].name} came before HELLO"
            raise self._refuse(wrong)


class AnswerParser(_Parser):
    """The client's side: turns a worker's bytes into answers. Who asked what is the caller's to know.

    `begin` reads an answer's header against what is allowed; then the body is `payload_left` bytes to take or pass by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.understands_notices = False
        self._in_notice = False

    def begin(self, command: str, least: int, most: int) -> int | None:
        """The size of the next answer's body, or None when more bytes are needed. Raises RemoteProtocolError."""
        if self._error is not None or self.payload_left:
            self._check()
        if self._in_notice:
            self._read_notice()
            return None
        start = self._start
        if self._end - start < ANSWER_HEADER.size:
            return None
        (size,) = ANSWER_HEADER.unpack_from(self._view, start)
        self._start = start + ANSWER_HEADER.size
        if size == ERROR_NOTICE and self.understands_notices:
            self._in_notice = True
            self._read_notice()
            return None
        if not least <= size <= most:
            allowed = f"{least}" if least == most else f"{least} to {most}"
            raise self._refuse(f"the answer to {command} announces {size} bytes, allowed are {allowed}")
        self.payload_left = size
        return int(size)

    def take_body(self, size: int) -> memoryview | None:
        """A small body as one view once it is complete, valid until the next call of `space`."""
        return None if self._end - self._start < size else self.take_payload(size)

    def _read_notice(self) -> None:
        head = ERROR_NOTICE_LENGTH.size
        if self.buffered < head:
            return
        (length,) = ERROR_NOTICE_LENGTH.unpack_from(self._view, self._start)
        if length > MAX_ERROR_NOTICE_BYTES:
            raise self._refuse(f"the worker's error notice announces {length} bytes")
        if self.buffered >= head + length:
            text = bytes(self._take(head + length)[head:]).decode(errors="replace")
            raise self._refuse(f"the worker says: {text}")
