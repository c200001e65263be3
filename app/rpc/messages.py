"""One frozen dataclass per command, and those of answers in `answer_messages`; `specs` says how each lies on the wire.

A message is scalars and tensor records in the order of its fields; open tails (graphs, batches) are memoryviews. The
bulk data of SET_TENSOR and GET_TENSOR is not part of any message: it goes straight between socket and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from app.rpc.answer_messages import (
    Allocated as Allocated,
)
from app.rpc.answer_messages import (
    Challenge as Challenge,
)
from app.rpc.answer_messages import (
    HelloAnswer as HelloAnswer,
)
from app.rpc.answer_messages import (
    MemoryAnswer as MemoryAnswer,
)
from app.rpc.answer_messages import (
    Proof as Proof,
)
from app.rpc.answer_messages import (
    Ticket as Ticket,
)
from app.rpc.answer_messages import (
    Value as Value,
)
from app.rpc.wire import NO_CAPS, Command, RpcTensor


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
class WriteMask:
    """Make an attention mask at an absolute address; no answer. `recipe` is a packed `MaskRecipe`."""

    command: ClassVar[Command] = Command.WRITE_MASK
    address: int
    recipe: memoryview


@dataclass(frozen=True, slots=True)
class ReadRegion:
    """Read bytes at an absolute address; GET_TENSOR without the tensor."""

    command: ClassVar[Command] = Command.READ_REGION
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Look through rows of float32 at an absolute address and read what is wanted of them, a wish for each row.

    Wishes and answer are as `app.engine.rows` packs them.
    """

    command: ClassVar[Command] = Command.READ_ROWS
    address: int
    n_columns: int
    wishes: memoryview


@dataclass(frozen=True, slots=True)
class TakeTurn:
    """WRITE_BATCH, GRAPH_RUN and READ_ROWS in one. `tail` is the wishes, then the items of writes."""

    command: ClassVar[Command] = Command.TAKE_TURN
    device: int
    graph_id: int
    address: int
    n_columns: int
    wishes_bytes: int
    tail: memoryview


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask for the same number back; answered without touching any device."""

    command: ClassVar[Command] = Command.PING
    nonce: int


@dataclass(frozen=True, slots=True)
class AuthChallenge:
    """Ask for a worker's nonce, and tell it ours; see `token`."""

    command: ClassVar[Command] = Command.AUTH_CHALLENGE
    nonce: bytes


@dataclass(frozen=True, slots=True)
class AuthProve:
    """Prove that we hold the worker's token; it answers with its own proof, or hangs up."""

    command: ClassVar[Command] = Command.AUTH_PROVE
    proof: bytes


@dataclass(frozen=True, slots=True)
class PushAccept:
    """Ask a receiver for a ticket with which another worker may push to this client's memory, on this route."""

    command: ClassVar[Command] = Command.PUSH_ACCEPT
    route: int


@dataclass(frozen=True, slots=True)
class PushConnect:
    """Have a sender connect to a receiver; `endpoint` is UTF-8. The answer is empty, or the reason why it cannot."""

    command: ClassVar[Command] = Command.PUSH_CONNECT
    route: int
    ticket: bytes
    endpoint: memoryview


@dataclass(frozen=True, slots=True)
class PushAttach:
    """From worker to worker: this connection brings what the ticket was given for."""

    command: ClassVar[Command] = Command.PUSH_ATTACH
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Push:
    """Have a sender send a region when everything before is done. The answer is 1, or 0 if the route has failed."""

    command: ClassVar[Command] = Command.PUSH
    route: int
    sequence: int
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PushTurn:
    """WRITE_BATCH, GRAPH_RUN and PUSH in one. `items` are those of writes."""

    command: ClassVar[Command] = Command.PUSH_TURN
    device: int
    graph_id: int
    address: int
    size_bytes: int
    route: int
    sequence: int
    items: memoryview


@dataclass(frozen=True, slots=True)
class PushTake:
    """Have a receiver wait for a push and put it here. The answer is 0 if it will not come.

    Else it is 1 more than the microseconds for which it had been there: the answer may leave with the next one.
    """

    command: ClassVar[Command] = Command.PUSH_TAKE
    route: int
    sequence: int
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PushData:
    """From worker to worker: the data of one push follows. No answer."""

    command: ClassVar[Command] = Command.PUSH_DATA
    sequence: int


Request = (
    Hello | AllocBuffer | GetAlignment | GetMaxSize | BufferGetBase | FreeBuffer | BufferClear | SetTensor
    | SetTensorHash | GetTensor | CopyTensor | GetDeviceMemory | InitTensor | GetAllocSize | DeviceCount
    | GraphRecompute | MemsetTensor | GraphCompute | Describe | GraphStore | GraphRun | GraphDrop | WriteBatch
    | WriteMask | ReadRegion | Ping | AuthChallenge | AuthProve
    | ReadRows | TakeTurn | PushAccept | PushConnect | PushAttach | Push | PushTurn | PushTake | PushData
)  # fmt: skip
Answer = HelloAnswer | Allocated | Value | MemoryAnswer | Challenge | Proof | Ticket
