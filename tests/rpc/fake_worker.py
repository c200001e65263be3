"""A worker that misbehaves as a test wishes. It keeps bytes and computes nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from app.rpc import messages as m
from app.rpc.protocol import RequestParser
from app.rpc.specs import SPECS
from app.rpc.wire import Command, RpcTensor

#: Gives the bytes to send instead of an answer; None hangs up.
Override = Callable[[Any], bytes | None]


def framed(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


class FakeWorker:
    """Listens on any port. `seen` holds every request in order, `payloads` the bulk data of every SET_TENSOR."""

    def __init__(
        self,
        *,
        version: tuple[int, int, int] = (7, 0, 0),
        pad: int = 0,
        devices: int = 1,
        memory: tuple[int, int] = (8 << 30, 8 << 30),
        max_size: int = 1 << 40,
        may_alloc: Callable[[int], bool] = lambda size: True,
        override: Mapping[Command, Override] | None = None,
        first_handle: int = 0x10000,
    ) -> None:
        self.seen: list[Any] = []
        self.payloads: list[bytes] = []
        self._version, self._pad, self._devices = version, pad, devices
        self._memory, self._max_size, self._may_alloc = memory, max_size, may_alloc
        self._override = override or {}
        self._next_handle = first_handle
        self._buffers: dict[int, bytearray] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def commands(self) -> list[str]:
        """What was asked so far, without the questions that `connect` puts."""
        start = {m.Hello, m.DeviceCount, m.GetMaxSize}
        return [request.command.name for request in self.seen if type(request) not in start]

    def hang_up(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        major, minor, _ = self._version
        parser = RequestParser((major, minor) if (major, minor) in SPECS else (7, 0))
        with contextlib.suppress(OSError, EOFError), sock:
            while True:
                while (request := parser.next_request()) is None:
                    self._receive(sock, parser)
                payload = bytearray()
                while parser.payload_left:
                    payload += parser.take_payload(1 << 30)
                    if parser.payload_left:
                        self._receive(sock, parser)
                if isinstance(request, m.GraphCompute):
                    request = m.GraphCompute(request.device, memoryview(bytes(request.graph)))
                self.seen.append(request)
                answer = self._answer(request, bytes(payload))
                if answer is None:
                    return
                sock.sendall(answer)

    @staticmethod
    def _receive(sock: socket.socket, parser: RequestParser) -> None:
        n = sock.recv_into(parser.space())
        if n == 0:
            raise EOFError
        parser.received(n)

    def _span(self, tensor: RpcTensor, offset: int) -> tuple[bytearray, int]:
        return self._buffers[tensor.buffer], tensor.data - tensor.buffer + offset

    def _answer(self, request: Any, payload: bytes) -> bytes | None:
        if request.command in self._override:
            return self._override[request.command](request)
        if isinstance(request, m.SetTensor):
            self.payloads.append(payload)
            memory, at = self._span(request.tensor, request.offset)
            memory[at : at + len(payload)] = payload
            return b""
        handler = _ANSWERS.get(type(request))
        return framed(handler(self, request)) if handler else b""

    def _alloc(self, request: m.AllocBuffer) -> bytes:
        if not self._may_alloc(request.size_bytes):
            return bytes(16)
        handle = self._next_handle
        self._next_handle += -(-request.size_bytes // 4096) * 4096 + 4096
        self._buffers[handle] = bytearray(min(request.size_bytes, 1 << 20))
        return struct.pack("<QQ", handle, request.size_bytes)

    def _get(self, request: m.GetTensor) -> bytes:
        memory, at = self._span(request.tensor, request.offset)
        return bytes(memory[at : at + request.size_bytes])

    def _alloc_size(self, request: m.GetAllocSize) -> bytes:
        return struct.pack("<Q", (request.tensor.ne[3] * request.tensor.nb[3]) & 0xFFFFFFFF)


_ANSWERS: dict[type, Callable[[FakeWorker, Any], bytes]] = {
    m.Hello: lambda fake, _: bytes((*fake._version, fake._pad)) + bytes(24),
    m.DeviceCount: lambda fake, _: struct.pack("<I", fake._devices),
    m.GetAlignment: lambda fake, _: struct.pack("<Q", 32),
    m.GetMaxSize: lambda fake, _: struct.pack("<Q", fake._max_size),
    m.GetDeviceMemory: lambda fake, _: struct.pack("<QQ", *fake._memory),
    m.BufferGetBase: lambda fake, request: struct.pack("<Q", request.remote_ptr),
    m.SetTensorHash: lambda fake, _: b"\0",
    m.CopyTensor: lambda fake, _: b"\0",
    m.AllocBuffer: FakeWorker._alloc,
    m.GetTensor: FakeWorker._get,
    m.GetAllocSize: FakeWorker._alloc_size,
}
