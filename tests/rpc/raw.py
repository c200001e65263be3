"""A client of plain structs and a socket, independent of the codec under test, for saying wrong things on purpose."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Self

F32, I32, I64 = 0, 26, 27
COMPUTE = 16


def frame(command: int, body: bytes = b"", size: int | None = None) -> bytes:
    """A request; `size` replaces the honest announcement."""
    return struct.pack("<BQ", command, len(body) if size is None else size) + body


def tensor(
    id_: int,
    buffer: int = 0,
    data: int = 0,
    *,
    type_: int = F32,
    ne: Sequence[int] = (4, 1, 1, 1),
    nb: Sequence[int] | None = None,
    op: int = 0,
    params: Sequence[int] = (),
    flags: int = 0,
    src: Sequence[int] = (),
    view: tuple[int, int] = (0, 0),
    name: bytes = b"t",
) -> bytes:
    """One record of 296 bytes. Strides of 4-byte elements unless given."""
    if nb is None:
        nb = [4, 4 * ne[0] & 0xFFFFFFFF, 4 * ne[0] * ne[1] & 0xFFFFFFFF, 4 * ne[0] * ne[1] * ne[2] & 0xFFFFFFFF]
    record = struct.pack("<QIQ", id_, type_, buffer) + struct.pack("<8I", *ne, *nb)
    record += struct.pack("<I16i", op, *params, *[0] * (16 - len(params)))
    record += struct.pack("<i10Q", flags, *src, *[0] * (10 - len(src)))
    return record + struct.pack("<3Q64si", *view, data, name, 0)


def graph(device: int, nodes: Sequence[int], tensors: Sequence[bytes], counts: tuple[int, int] | None = None) -> bytes:
    n_nodes, n_tensors = counts or (len(nodes), len(tensors))
    head = struct.pack("<II", device, n_nodes) + struct.pack(f"<{len(nodes)}Q", *nodes)
    return head + struct.pack("<I", n_tensors) + b"".join(tensors)


class RawClient:
    """One connection. Methods that ask raise EOFError when the worker hangs up instead."""

    def __init__(self, port: int, *, hello: bool = True, version: int = 7, timeout_s: float = 20.0) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout_s)
        self.version = version
        self.hello_answer = self.ask(14, bytes(24)) if hello else b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def tell(self, command: int, body: bytes = b"") -> None:
        self.send(frame(command, body))

    def ask(self, command: int, body: bytes = b"") -> bytes:
        self.tell(command, body)
        return self.answer()

    def answer(self) -> bytes:
        (size,) = struct.unpack("<Q", self._exactly(8))
        return self._exactly(size)

    def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            part = self.sock.recv(n - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def is_closed(self) -> bool:
        """Whether the worker hangs up without another byte; waits for it for as long as the socket's time-out."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def alloc(self, size: int, device: int = 0) -> tuple[int, int]:
        """Handle and base address of a new buffer."""
        handle, got = struct.unpack("<QQ", self.ask(0, struct.pack("<IQ", device, size)))
        if not handle:
            return 0, 0
        assert got >= size
        (base,) = struct.unpack("<Q", self.ask(3, struct.pack("<Q", handle)))
        return handle, base

    def set(self, record: bytes, data: bytes, offset: int = 0) -> None:
        flag = b"\0" if self.version == 7 else b""
        self.tell(6, record + flag + struct.pack("<Q", offset) + data)

    def get(self, record: bytes, size: int, offset: int = 0) -> bytes:
        return self.ask(8, record + struct.pack("<QQ", offset, size))

    def floats(self, record: bytes, n: int = 4) -> tuple[float, ...]:
        return struct.unpack(f"<{n}f", self.get(record, 4 * n))

    def free_memory(self, device: int = 0) -> int:
        return int(struct.unpack("<QQ", self.ask(11, struct.pack("<I", device)))[0])


class Sum:
    """r = a + b over three buffers of one connection."""

    def __init__(
        self, client: RawClient, a: Sequence[float], b: Sequence[float], device: int = 0, flags: int = COMPUTE
    ) -> None:
        self.client = client
        self.handles, bases = zip(*(client.alloc(64, device) for _ in range(3)), strict=True)
        self.bases = bases
        self.a = tensor(1, self.handles[0], bases[0])
        self.b = tensor(2, self.handles[1], bases[1])
        self.r = tensor(3, self.handles[2], bases[2], op=2, flags=flags, src=(1, 2))
        client.set(self.a, struct.pack("<4f", *a))
        client.set(self.b, struct.pack("<4f", *b))
        client.tell(10, graph(device, [3], [self.a, self.b, self.r]))

    def result(self) -> tuple[float, ...]:
        return self.client.floats(self.r)
