"""One frozen dataclass per command, and the tables that say how each lies on the wire.

A message is scalars and tensor records in the order of its fields; `Layout` turns it into bytes and back. Variable
tails (graphs, batches, bulk data) are memoryviews. The bulk data of SET_TENSOR and GET_TENSOR is not part of any
message: the header goes through here, the data straight between socket and memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar

from app.engine.ggml import MAX_SRC
from app.errors import RemoteProtocolError
from app.rpc.wire import (
    NO_CAPS,
    TENSOR_FORMAT,
    TENSOR_VALUES,
    U64_MAX,
    Command,
    RpcTensor,
    tensor_from_values,
)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first request on every connection."""

    command: ClassVar[Command] = Command.HELLO
    conn_caps: bytes = NO_CAPS


@dataclass(frozen=True, slots=True)
class AllocBuffer:
    """Reserve memory."""

    command: ClassVar[Command] = Command.ALLOC_BUFFER
    device: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GetAlignment:
    """Ask for a device's alignment; the cheapest command that answers."""

    command: ClassVar[Command] = Command.GET_ALIGNMENT
    device: int


@dataclass(frozen=True, slots=True)
class GetMaxSize:
    """Ask for the largest buffer a device can make."""

    command: ClassVar[Command] = Command.GET_MAX_SIZE
    device: int


@dataclass(frozen=True, slots=True)
class BufferGetBase:
    """Ask for the address of a buffer's first byte."""

    command: ClassVar[Command] = Command.BUFFER_GET_BASE
    remote_ptr: int


@dataclass(frozen=True, slots=True)
class FreeBuffer:
    """Give a buffer back; no answer. Stored graphs are forgotten."""

    command: ClassVar[Command] = Command.FREE_BUFFER
    remote_ptr: int


@dataclass(frozen=True, slots=True)
class BufferClear:
    """Set every byte of a buffer; no answer."""

    command: ClassVar[Command] = Command.BUFFER_CLEAR
    remote_ptr: int
    value: int


@dataclass(frozen=True, slots=True)
class SetTensor:
    """Write bytes at `tensor.data + offset`; the data follows. No answer. `cache` is not on the wire of 6.0."""

    command: ClassVar[Command] = Command.SET_TENSOR
    tensor: RpcTensor
    cache: int
    offset: int


@dataclass(frozen=True, slots=True)
class SetTensorHash:
    """Ask the worker to place bytes it may already have, named by their FNV-1a 64."""

    command: ClassVar[Command] = Command.SET_TENSOR_HASH
    tensor: RpcTensor
    offset: int
    hash: int


@dataclass(frozen=True, slots=True)
class GetTensor:
    """Read bytes at `tensor.data + offset`."""

    command: ClassVar[Command] = Command.GET_TENSOR
    tensor: RpcTensor
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CopyTensor:
    """Copy the bytes of one tensor to another within the worker."""

    command: ClassVar[Command] = Command.COPY_TENSOR
    source: RpcTensor
    target: RpcTensor


@dataclass(frozen=True, slots=True)
class GetDeviceMemory:
    """Ask for free and total bytes."""

    command: ClassVar[Command] = Command.GET_DEVICE_MEMORY
    device: int


@dataclass(frozen=True, slots=True)
class InitTensor:
    """Let the worker zero the padding behind a tensor it just got a place for; no answer."""

    command: ClassVar[Command] = Command.INIT_TENSOR
    tensor: RpcTensor


@dataclass(frozen=True, slots=True)
class GetAllocSize:
    """Ask how much memory a tensor needs, scratch behind it included."""

    command: ClassVar[Command] = Command.GET_ALLOC_SIZE
    device: int
    tensor: RpcTensor
    sources: tuple[RpcTensor, ...]


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """Ask how many devices the worker serves."""

    command: ClassVar[Command] = Command.DEVICE_COUNT


@dataclass(frozen=True, slots=True)
class GraphRecompute:
    """Run the last graph of a device again; no answer."""

    command: ClassVar[Command] = Command.GRAPH_RECOMPUTE
    device: int


@dataclass(frozen=True, slots=True)
class MemsetTensor:
    """Set bytes at `tensor.data + offset` to one value; no answer."""

    command: ClassVar[Command] = Command.MEMSET_TENSOR
    tensor: RpcTensor
    offset: int
    size_bytes: int
    value: int


@dataclass(frozen=True, slots=True)
class GraphCompute:
    """Run a graph; no answer. `graph` is `n_nodes u32 | ids u64[] | n_tensors u32 | tensors[]`, see `lower`."""

    command: ClassVar[Command] = Command.GRAPH_COMPUTE
    device: int
    graph: memoryview


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask a Tandem worker what its devices are; it answers JSON."""

    command: ClassVar[Command] = Command.DESCRIBE


@dataclass(frozen=True, slots=True)
class GraphStore:
    """Check a graph and keep it under an id. The answer is empty, or the reason why it cannot run."""

    command: ClassVar[Command] = Command.GRAPH_STORE
    device: int
    graph_id: int
    graph: memoryview


@dataclass(frozen=True, slots=True)
class GraphRun:
    """Run a kept graph; no answer."""

    command: ClassVar[Command] = Command.GRAPH_RUN
    device: int
    graph_id: int


@dataclass(frozen=True, slots=True)
class GraphDrop:
    """Forget a kept graph; no answer."""

    command: ClassVar[Command] = Command.GRAPH_DROP
    device: int
    graph_id: int


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Small writes in one command; no answer. `items` is a sequence of `address u64 | size u32 | data`."""

    command: ClassVar[Command] = Command.WRITE_BATCH
    items: memoryview


@dataclass(frozen=True, slots=True)
class ReadRegion:
    """Read bytes at an absolute address; GET_TENSOR without the tensor."""

    command: ClassVar[Command] = Command.READ_REGION
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask for the same number back; answered without touching any device."""

    command: ClassVar[Command] = Command.PING
    nonce: int


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """Who answers: the protocol version, and a pad byte that only Tandem workers set."""

    major: int
    minor: int
    patch: int
    pad: int
    conn_caps: bytes = NO_CAPS


@dataclass(frozen=True, slots=True)
class Allocated:
    """A new buffer; zeros mean the allocation was refused."""

    remote_ptr: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """One unsigned number: an alignment, a size, an address, a count or a result of 0 or 1."""

    value: int


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """Free and total bytes of a device."""

    free_bytes: int
    total_bytes: int


Request = (
    Hello | AllocBuffer | GetAlignment | GetMaxSize | BufferGetBase | FreeBuffer | BufferClear | SetTensor
    | SetTensorHash | GetTensor | CopyTensor | GetDeviceMemory | InitTensor | GetAllocSize | DeviceCount
    | GraphRecompute | MemsetTensor | GraphCompute | Describe | GraphStore | GraphRun | GraphDrop | WriteBatch
    | ReadRegion | Ping
)  # fmt: skip
Answer = HelloAnswer | Allocated | Value | MemoryAnswer


class Layout:
    """How a message lies on the wire: struct codes of its fields in order; T is a tensor record, `*` the open tail.

    A field may be left out of one version's wire (`omit`); it is decoded as zero.
    """

    __slots__ = ("codes", "_names", "_plain", "_struct", "_values", "fixed_bytes", "has_tail", "message_type", "omit")

    def __init__(self, message_type: type[Any], codes: str, *, omit: str | None = None) -> None:
        names = [field.name for field in fields(message_type)]
        self.message_type = message_type
        self.omit = omit
        self.codes = codes.split()
        self.has_tail = bool(self.codes) and self.codes[-1] == "*"
        self._names = [name for name in names if name != omit]
        heads = self.codes[:-1] if self.has_tail else self.codes
        self._struct = struct.Struct("<" + "".join(_expanded(code) for code in heads))
        self.fixed_bytes = self._struct.size
        self._plain = omit is None and not any("T" in code or code == "*" for code in self.codes)
        self._values = _getter(names)

    def pack(self, message: Any) -> bytes:
        """The bytes of everything but the tail."""
        if self._plain:
            return self._struct.pack(*self._values(message))
        values: list[Any] = []
        for code, name in zip(self.codes, self._names, strict=True):
            value = getattr(message, name)
            if code == "T":
                values += value.values()
            elif code.endswith("T"):
                for tensor in value:
                    values += tensor.values()
            elif code != "*":
                values.append(value)
        return self._struct.pack(*values)

    def unpack(self, body: memoryview) -> Any:
        """The message of a body that is at least `fixed_bytes` long."""
        values = self._struct.unpack_from(body)
        if self._plain:
            return self.message_type(*values)
        decoded: dict[str, Any] = {} if self.omit is None else {self.omit: 0}
        at = 0
        for code, name in zip(self.codes, self._names, strict=True):
            if code == "*":
                decoded[name] = body[self.fixed_bytes :]
                continue
            if not code.endswith("T"):
                decoded[name] = values[at]
                at += 1
                continue
            n = int(code[:-1] or "1")
            span = values[at : at + n * TENSOR_VALUES]
            at += n * TENSOR_VALUES
            tensors = tuple(tensor_from_values(span[i : i + TENSOR_VALUES]) for i in range(0, len(span), TENSOR_VALUES))
            decoded[name] = tensors if len(code) > 1 else tensors[0]
        return self.message_type(**decoded)


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads these fields of a message in one call."""
    if len(names) > 1:
        return attrgetter(*names)
    return (lambda message: (getattr(message, names[0]),)) if names else (lambda message: ())


def _expanded(code: str) -> str:
    return TENSOR_FORMAT * int(code[:-1] or "1") if code.endswith("T") else code


@dataclass(frozen=True, slots=True)
class Spec:
    """One command: its request, whether bulk data follows it, and its answer.

    `answer_bytes` is a size, a function of the request for open answers, or None when there is no answer;
    `answer` decodes it (None: the body is the answer).
    """

    request: Layout
    answer_bytes: int | Callable[[Any], tuple[int, int]] | None = None
    answer: Layout | None = None
    streams: bool = False


_U64 = Layout(Value, "Q")
_U32 = Layout(Value, "I")
_U8 = Layout(Value, "B")

#: The longest DESCRIBE or GRAPH_STORE answer a client accepts.
MAX_TEXT_ANSWER_BYTES = 1 << 20


def _exactly(request: Any) -> tuple[int, int]:
    return request.size_bytes, request.size_bytes


def _text(request: Any) -> tuple[int, int]:
    del request
    return 0, MAX_TEXT_ANSWER_BYTES


def _answered(request: Layout, answer: Layout) -> Spec:
    return Spec(request, answer.fixed_bytes, answer)


_COMMON: dict[Command, Spec] = {
    Command.HELLO: _answered(Layout(Hello, "24s"), Layout(HelloAnswer, "B B B B 24s")),
    Command.ALLOC_BUFFER: _answered(Layout(AllocBuffer, "I Q"), Layout(Allocated, "Q Q")),
    Command.GET_ALIGNMENT: _answered(Layout(GetAlignment, "I"), _U64),
    Command.GET_MAX_SIZE: _answered(Layout(GetMaxSize, "I"), _U64),
    Command.BUFFER_GET_BASE: _answered(Layout(BufferGetBase, "Q"), _U64),
    Command.FREE_BUFFER: Spec(Layout(FreeBuffer, "Q")),
    Command.BUFFER_CLEAR: Spec(Layout(BufferClear, "Q B")),
    Command.SET_TENSOR_HASH: _answered(Layout(SetTensorHash, "T Q Q"), _U8),
    Command.GET_TENSOR: Spec(Layout(GetTensor, "T Q Q"), _exactly),
    Command.COPY_TENSOR: _answered(Layout(CopyTensor, "T T"), _U8),
    Command.GRAPH_COMPUTE: Spec(Layout(GraphCompute, "I *")),
    Command.GET_DEVICE_MEMORY: _answered(Layout(GetDeviceMemory, "I"), Layout(MemoryAnswer, "Q Q")),
    Command.INIT_TENSOR: Spec(Layout(InitTensor, "T")),
    Command.GET_ALLOC_SIZE: _answered(Layout(GetAllocSize, f"I T {MAX_SRC}T"), _U64),
    Command.DEVICE_COUNT: _answered(Layout(DeviceCount, ""), _U32),
    Command.GRAPH_RECOMPUTE: Spec(Layout(GraphRecompute, "I")),
    Command.MEMSET_TENSOR: Spec(Layout(MemsetTensor, "T Q Q B")),
    # Tandem's own
    Command.DESCRIBE: Spec(Layout(Describe, ""), _text),
    Command.GRAPH_STORE: Spec(Layout(GraphStore, "I Q *"), _text),
    Command.GRAPH_RUN: Spec(Layout(GraphRun, "I Q")),
    Command.GRAPH_DROP: Spec(Layout(GraphDrop, "I Q")),
    Command.WRITE_BATCH: Spec(Layout(WriteBatch, "*")),
    Command.READ_REGION: Spec(Layout(ReadRegion, "Q Q"), _exactly),
    Command.PING: _answered(Layout(Ping, "Q"), _U64),
}

Specs = dict[Command, Spec]

#: Commands by (major, minor) of the protocol.
SPECS: dict[tuple[int, int], Specs] = {
    (6, 0): {**_COMMON, Command.SET_TENSOR: Spec(Layout(SetTensor, "T Q", omit="cache"), streams=True)},
    (7, 0): {**_COMMON, Command.SET_TENSOR: Spec(Layout(SetTensor, "T B Q"), streams=True)},
}

#: The versions this side speaks, for messages.
SPOKEN = "6.0 and 7.0"


def decode_answer(spec: Spec, body: memoryview) -> Any:
    """The answer as its message, or the body itself where the command has no fixed answer."""
    return body if spec.answer is None else spec.answer.unpack(body)


def answer_range(spec: Spec, request: Any) -> tuple[int, int]:
    """The least and the most bytes the answer to `request` may have."""
    if callable(spec.answer_bytes):
        return spec.answer_bytes(request)
    if spec.answer_bytes is None:
        raise RemoteProtocolError("this command has no answer")
    return spec.answer_bytes, spec.answer_bytes


def check_request_size(spec: Spec, command: Command, size: int, max_message_bytes: int) -> None:
    """Refuse an announced size before anything is allocated for it."""
    fixed = spec.request.fixed_bytes
    if spec.streams:
        most = U64_MAX
    elif spec.request.has_tail:
        most = max_message_bytes
    else:
        most = fixed
    if not fixed <= size <= most:
        allowed = f"{fixed}" if most == fixed else f"{fixed} to {most}"
        raise RemoteProtocolError(f"{command.name} announces {size} bytes, allowed are {allowed}")
