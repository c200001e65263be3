"""How every message lies on the wire: the tables that codec, client and worker read. Explicit, one line per command."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from app.engine.ggml import MAX_SRC
from app.engine.rows import RowSelection
from app.errors import LocalProtocolError, RemoteProtocolError
from app.rpc import messages as m
from app.rpc.wire import TENSOR_FORMAT, TENSOR_VALUES, U64_MAX, Command, tensor_from_values


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
        self._plain = omit is None and not any("T" in code for code in self.codes)
        self._values = _getter(names[:-1] if self.has_tail else names)

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
            else:
                values.append(value)
        return self._struct.pack(*values)

    def unpack(self, body: memoryview) -> Any:
        """The message of a body that is at least `fixed_bytes` long."""
        values = self._struct.unpack_from(body)
        if self._plain:
            return self.message_type(*values, body[self.fixed_bytes :]) if self.has_tail else self.message_type(*values)
        decoded: dict[str, Any] = {} if self.omit is None else {self.omit: 0}
        at = 0
        for code, name in zip(self.codes, self._names, strict=True):
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


_U64 = Layout(m.Value, "Q")
_U32 = Layout(m.Value, "I")
_U8 = Layout(m.Value, "B")

#: The longest DESCRIBE or GRAPH_STORE answer a client accepts.
MAX_TEXT_ANSWER_BYTES = 1 << 20


def _exactly(request: Any) -> tuple[int, int]:
    return request.size_bytes, request.size_bytes


def _text(request: Any) -> tuple[int, int]:
    del request
    return 0, MAX_TEXT_ANSWER_BYTES


def _selected(request: Any) -> tuple[int, int]:
    n_bytes = RowSelection.unpack(request.n_columns, request.wishes).n_bytes
    return n_bytes, n_bytes


def _selected_in_turn(request: Any) -> tuple[int, int]:
    n_bytes = RowSelection.unpack(request.n_columns, request.tail[: request.wishes_bytes]).n_bytes
    return n_bytes, n_bytes


def _answered(request: Layout, answer: Layout) -> Spec:
    return Spec(request, answer.fixed_bytes, answer)


_COMMON: dict[Command, Spec] = {
    Command.HELLO: _answered(Layout(m.Hello, "24s"), Layout(m.HelloAnswer, "B B B B 24s")),
    Command.ALLOC_BUFFER: _answered(Layout(m.AllocBuffer, "I Q"), Layout(m.Allocated, "Q Q")),
    Command.GET_ALIGNMENT: _answered(Layout(m.GetAlignment, "I"), _U64),
    Command.GET_MAX_SIZE: _answered(Layout(m.GetMaxSize, "I"), _U64),
    Command.BUFFER_GET_BASE: _answered(Layout(m.BufferGetBase, "Q"), _U64),
    Command.FREE_BUFFER: Spec(Layout(m.FreeBuffer, "Q")),
    Command.BUFFER_CLEAR: Spec(Layout(m.BufferClear, "Q B")),
    Command.SET_TENSOR_HASH: _answered(Layout(m.SetTensorHash, "T Q Q"), _U8),
    Command.GET_TENSOR: Spec(Layout(m.GetTensor, "T Q Q"), _exactly),
    Command.COPY_TENSOR: _answered(Layout(m.CopyTensor, "T T"), _U8),
    Command.GRAPH_COMPUTE: Spec(Layout(m.GraphCompute, "I *")),
    Command.GET_DEVICE_MEMORY: _answered(Layout(m.GetDeviceMemory, "I"), Layout(m.MemoryAnswer, "Q Q")),
    Command.INIT_TENSOR: Spec(Layout(m.InitTensor, "T")),
    Command.GET_ALLOC_SIZE: _answered(Layout(m.GetAllocSize, f"I T {MAX_SRC}T"), _U64),
    Command.DEVICE_COUNT: _answered(Layout(m.DeviceCount, ""), _U32),
    Command.GRAPH_RECOMPUTE: Spec(Layout(m.GraphRecompute, "I")),
    Command.MEMSET_TENSOR: Spec(Layout(m.MemsetTensor, "T Q Q B")),
    # Tandem's own
    Command.DESCRIBE: Spec(Layout(m.Describe, ""), _text),
    Command.GRAPH_STORE: Spec(Layout(m.GraphStore, "I Q *"), _text),
    Command.GRAPH_RUN: Spec(Layout(m.GraphRun, "I Q")),
    Command.GRAPH_DROP: Spec(Layout(m.GraphDrop, "I Q")),
    Command.WRITE_BATCH: Spec(Layout(m.WriteBatch, "*")),
    Command.WRITE_MASK: Spec(Layout(m.WriteMask, "Q *")),
    Command.READ_REGION: Spec(Layout(m.ReadRegion, "Q Q"), _exactly),
    Command.READ_ROWS: Spec(Layout(m.ReadRows, "Q I *"), _selected),
    Command.TAKE_TURN: Spec(Layout(m.TakeTurn, "I Q Q I I *"), _selected_in_turn),
    Command.PING: _answered(Layout(m.Ping, "Q"), _U64),
    Command.AUTH_CHALLENGE: _answered(Layout(m.AuthChallenge, "32s"), Layout(m.Challenge, "B 32s")),
    Command.AUTH_PROVE: _answered(Layout(m.AuthProve, "32s"), Layout(m.Proof, "32s")),
    Command.PUSH_ACCEPT: _answered(Layout(m.PushAccept, "I"), Layout(m.Ticket, "32s")),
    Command.PUSH_CONNECT: Spec(Layout(m.PushConnect, "I 32s *"), _text),
    Command.PUSH_ATTACH: _answered(Layout(m.PushAttach, "32s"), _U8),
    Command.PUSH: _answered(Layout(m.Push, "I Q Q Q"), _U8),
    Command.PUSH_TURN: _answered(Layout(m.PushTurn, "I Q Q Q I Q *"), _U8),
    Command.PUSH_TAKE: _answered(Layout(m.PushTake, "I Q Q Q"), _U32),
    Command.PUSH_DATA: Spec(Layout(m.PushData, "Q"), streams=True),
}

Specs = dict[Command, Spec]

#: Commands by (major, minor) of the protocol.
SPECS: dict[tuple[int, int], Specs] = {
    (6, 0): {**_COMMON, Command.SET_TENSOR: Spec(Layout(m.SetTensor, "T Q", omit="cache"), streams=True)},
    (7, 0): {**_COMMON, Command.SET_TENSOR: Spec(Layout(m.SetTensor, "T B Q"), streams=True)},
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
        raise LocalProtocolError("this command has no answer")
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
