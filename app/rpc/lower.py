"""Programs to graph bytes, and graph bytes back to programs.

A graph on the wire is `n_nodes u32 | node ids u64[] | n_tensors u32 | tensors[]`. Going out, only buffers that the
receiver knows are named: everything else travels with `buffer` and `data` 0. Coming in, every number is hostile until
checked here: what passes is a program whose tensors lie inside buffers of this connection and whose nodes are in an
order that can run. Whether an op accepts these types and shapes is for the device to say.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from app.engine.ggml import MAX_OP_PARAMS, MAX_SRC, TRAITS, VIEW_OPS, GGMLType, Op, Shape, TensorFlag, tensor_bytes
from app.engine.program import Buffer, PlacedTensor, Program
from app.errors import RemoteProtocolError, UnsupportedOp
from app.rpc.wire import TENSOR, TENSOR_BYTES, U32_MAX, ZERO_PARAMS, ZERO_SRC, RpcTensor, tensor_from_values

_COUNT = struct.Struct("<I")

#: Types and ops by number; a missing one is unknown.
TYPES: Mapping[int, GGMLType] = {int(type_): type_ for type_ in GGMLType}
OPS: Mapping[int, Op] = {int(op): op for op in Op}


@dataclass(frozen=True, slots=True)
class Address:
    """A buffer as a worker names it: its handle, and the address of its first byte."""

    remote_ptr: int
    base: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """A buffer as a worker keeps it for one client: the address the client was told, and the memory behind it."""

    buffer: Buffer
    base: int
    device: int


# -- going out ----------------------------------------------------------------------------------------------------


def encode_graph(program: Program, locate: Callable[[Buffer], Address | None], device_name: str) -> bytearray:
    """A program as graph bytes. `locate` knows the receiver's buffers and answers None for all others.

    Raises UnsupportedOp for tensors that the wire cannot express.
    """
    n_nodes, n_tensors = len(program.nodes), len(program.tensors)
    head = struct.Struct(f"<I{n_nodes}QI")
    out = bytearray(head.size + n_tensors * TENSOR_BYTES)
    head.pack_into(out, 0, n_nodes, *(i + 1 for i in program.nodes), n_tensors)
    places: dict[int, tuple[int, int]] = {}
    at = head.size
    for number, tensor in enumerate(program.tensors, 1):
        remote_ptr = data = 0
        if tensor.buffer is not None:
            place = places.get(id(tensor.buffer))
            if place is None:
                found = locate(tensor.buffer)
                place = places[id(tensor.buffer)] = (0, 0) if found is None else (found.remote_ptr, found.base)
            if place[0]:
                remote_ptr, data = place[0], place[1] + tensor.offset
        try:
            _pack_tensor(out, at, number, tensor, tensor.nb, remote_ptr, data)
        except struct.error:
            _pack_tensor(out, at, number, tensor, _wire_strides(tensor, device_name), remote_ptr, data)
        at += TENSOR_BYTES
    return out


def _pack_tensor(
    out: bytearray, at: int, number: int, tensor: PlacedTensor, nb: Shape, remote_ptr: int, data: int
) -> None:
    n_params, n_src = len(tensor.params), len(tensor.src)
    TENSOR.pack_into(
        out,
        at,
        number,
        tensor.type,
        remote_ptr,
        *tensor.ne,
        *nb,
        tensor.op,
        *tensor.params,
        *ZERO_PARAMS[n_params:],
        tensor.flags,
        *[i + 1 for i in tensor.src],
        *ZERO_SRC[n_src:],
        tensor.view_src + 1,
        tensor.view_offs,
        data,
        tensor.name.encode()[:63],
        tensor.use_count,
    )


def _wire_strides(tensor: PlacedTensor, device_name: str) -> Shape:
    """Strides that fit 32 bits: one of a dimension with a single element is never used and may be replaced."""

    def refuse(reason: str) -> UnsupportedOp:
        return UnsupportedOp(device_name, tensor.op.name, f"tensor {tensor.name!r} {reason}")

    if len(tensor.params) > MAX_OP_PARAMS or len(tensor.src) > MAX_SRC:
        raise refuse(f"has {len(tensor.params)} parameters and {len(tensor.src)} sources, the wire carries 16 and 10")
    nb = list(tensor.nb)
    for i, (extent, stride) in enumerate(zip(tensor.ne, tensor.nb, strict=True)):
        if extent > U32_MAX:
            raise refuse(f"has {extent} elements in dimension {i}, the wire carries 32 bits; use a smaller --ctx-size")
        if stride <= U32_MAX:
            continue
        if extent != 1 or i == 0:
            raise refuse(
                f"has a stride of {stride} bytes in dimension {i}, the wire carries less than 4 GiB; "
                f"use a smaller --ctx-size or fewer slots"
            )
        nb[i] = nb[i - 1]
    return (nb[0], nb[1], nb[2], nb[3])


def describe_tensor(tensor: PlacedTensor, device_name: str) -> RpcTensor:
    """A tensor without place or sources, as GET_ALLOC_SIZE wants it. Raises UnsupportedOp like `encode_graph`."""
    nb = tensor.nb if max(*tensor.nb, *tensor.ne) <= U32_MAX else _wire_strides(tensor, device_name)
    params = (*tensor.params, *ZERO_PARAMS[len(tensor.params) :])
    return RpcTensor(id=1, type=tensor.type, ne=tensor.ne, nb=nb, op=tensor.op, params=params, flags=tensor.flags)


# -- coming in ----------------------------------------------------------------------------------------------------


def flags_nodes(graph: memoryview) -> bool:
    """Whether some tensor says that it is to be computed. Raises RemoteProtocolError."""
    _, records = _split(graph)
    return any(tensor_from_values(values).flags & TensorFlag.COMPUTE for values in TENSOR.iter_unpack(records))


def decode_graph(
    graph: memoryview, buffers: Mapping[int, Mapped], device: int, name: str, *, all_run: bool = False
) -> Program:
    """Graph bytes as a program on buffers of `device`. Raises RemoteProtocolError on anything that is not right.

    `all_run`: the sender knows no COMPUTE flag, every node is meant.
    """
    node_ids, records = _split(graph)
    tensors = [tensor_from_values(values) for values in TENSOR.iter_unpack(records)]
    if all_run:
        meant = frozenset(node_ids)
        tensors = [replace(t, flags=t.flags | TensorFlag.COMPUTE) if t.id in meant else t for t in tensors]
    index = {tensor.id: i for i, tensor in enumerate(tensors)}
    if len(index) != len(tensors) or 0 in index:
        raise RemoteProtocolError("tensor ids must be unique and not zero")
    missing = [id_ for id_ in node_ids if id_ not in index]
    if missing:
        raise RemoteProtocolError(f"node {missing[0]:#x} is not in the tensor list")
    nodes = tuple(index[id_] for id_ in node_ids)
    if len(set(nodes)) != len(nodes):
        raise RemoteProtocolError("a node is listed twice")
    listed = frozenset(nodes)
    placed = tuple(_place(tensor, index, buffers, device, will_run=i in listed) for i, tensor in enumerate(tensors))
    _check_views(placed)
    _check_order(placed, nodes)
    return Program(name, placed, nodes)


def _split(graph: memoryview) -> tuple[tuple[int, ...], memoryview]:
    """Node ids and tensor records, with both counts checked against the bytes that are really there."""
    size = len(graph)
    if size < 2 * _COUNT.size:
        raise RemoteProtocolError(f"a graph of {size} bytes has no room for its counts")
    (n_nodes,) = _COUNT.unpack_from(graph)
    ids_end = _COUNT.size + 8 * n_nodes
    if ids_end + _COUNT.size > size:
        raise RemoteProtocolError(f"a graph of {size} bytes announces {n_nodes} nodes")
    (n_tensors,) = _COUNT.unpack_from(graph, ids_end)
    if ids_end + _COUNT.size + n_tensors * TENSOR_BYTES != size:
        raise RemoteProtocolError(f"a graph of {size} bytes announces {n_nodes} nodes and {n_tensors} tensors")
    return struct.unpack_from(f"<{n_nodes}Q", graph, _COUNT.size), graph[ids_end + _COUNT.size :]


def checked_type(tensor: RpcTensor) -> GGMLType:
    """The type, once it and the shape make sense together. Raises RemoteProtocolError."""
    type_ = TYPES.get(tensor.type)
    if type_ is None:
        raise RemoteProtocolError(f"tensor {_label(tensor)} has unknown type {tensor.type}")
    block, block_bytes = TRAITS[type_]
    if tensor.ne[0] % block:
        raise RemoteProtocolError(f"tensor {_label(tensor)} has rows of {tensor.ne[0]}, {type_.name} packs {block}")
    if block > 1 and tensor.nb[0] != block_bytes:
        raise RemoteProtocolError(f"tensor {_label(tensor)} has {tensor.nb[0]} bytes per block of {type_.name}")
    if block == 1 and (tensor.nb[0] < block_bytes or any(stride % block_bytes for stride in tensor.nb)):
        raise RemoteProtocolError(f"tensor {_label(tensor)} has strides {tensor.nb} for {block_bytes}-byte elements")
    return type_


def locate_tensor(tensor: RpcTensor, buffers: Mapping[int, Mapped]) -> tuple[Mapped, int, int]:
    """A tensor's buffer, its offset there and its bytes, all inside the buffer. Raises RemoteProtocolError."""
    type_ = checked_type(tensor)
    mapped = buffers.get(tensor.buffer)
    if mapped is None:
        raise RemoteProtocolError(f"tensor {_label(tensor)} names buffer {tensor.buffer:#x}, not one of this client's")
    offset = tensor.data - mapped.base
    n_bytes = tensor_bytes(type_, tensor.ne, tensor.nb)
    if offset < 0 or offset + n_bytes > mapped.buffer.size_bytes:
        raise RemoteProtocolError(
            f"tensor {_label(tensor)} takes {n_bytes} bytes at offset {offset} of a buffer of "
            f"{mapped.buffer.size_bytes} bytes"
        )
    return mapped, offset, n_bytes


def _place(
    tensor: RpcTensor, index: Mapping[int, int], buffers: Mapping[int, Mapped], device: int, *, will_run: bool
) -> PlacedTensor:
    """One record with its references resolved. What is only mentioned need not be of an op we know."""
    buffer: Buffer | None = None
    offset = 0
    if tensor.buffer == 0 and tensor.data == 0:
        type_ = checked_type(tensor)
    else:
        mapped, offset, _ = locate_tensor(tensor, buffers)
        if mapped.device != device:
            raise RemoteProtocolError(f"tensor {_label(tensor)} lies on device {mapped.device}, the graph on {device}")
        type_, buffer = TYPES[tensor.type], mapped.buffer
        if TRAITS[type_].block_elements == 1 and offset % TRAITS[type_].block_bytes:
            raise RemoteProtocolError(f"tensor {_label(tensor)} stands at the odd offset {offset}")
    try:
        src = tuple(index[id_] if id_ else -1 for id_ in _trimmed(tensor.src))
        view_src = index[tensor.view_src] if tensor.view_src else -1
    except KeyError as error:
        raise RemoteProtocolError(f"tensor {_label(tensor)} refers to an id that is not in the list: {error}") from None
    op = OPS.get(tensor.op)
    flags = TensorFlag(tensor.flags & 31)
    if op is None:
        if will_run and flags & TensorFlag.COMPUTE:
            raise RemoteProtocolError(f"node {_label(tensor)} has op {tensor.op}, which this worker does not know")
        op, src = Op.NONE, ()
    return PlacedTensor(
        type=type_,
        ne=tensor.ne,
        nb=tensor.nb,
        op=op,
        params=tensor.params,
        flags=flags,
        src=src,
        view_src=view_src,
        view_offs=tensor.view_offs,
        buffer=buffer,
        offset=offset,
        name=tensor.name.decode(errors="replace"),
        use_count=max(tensor.use_count, 0),
    )


def _trimmed(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Source ids up to the last one that is set."""
    n = len(ids)
    while n and not ids[n - 1]:
        n -= 1
    return ids[:n]


def _check_views(tensors: tuple[PlacedTensor, ...]) -> None:
    """A view lies inside what it views, in the same buffer; chains of views end."""
    for tensor in tensors:
        at, steps = tensor.view_src, 0
        while at >= 0:
            steps += 1
            if steps > len(tensors):
                raise RemoteProtocolError(f"tensor {tensor.name!r} views itself")
            at = tensors[at].view_src
        if tensor.view_src < 0 or tensor.buffer is None:
            continue
        owner = tensors[tensor.view_src]
        start = tensor.offset - owner.offset
        if owner.buffer is not tensor.buffer or start < 0 or start + tensor.n_bytes > owner.n_bytes:
            raise RemoteProtocolError(f"view {tensor.name!r} does not lie inside {owner.name!r}")


def _check_order(tensors: tuple[PlacedTensor, ...], nodes: tuple[int, ...]) -> None:
    """What will be computed has memory, and so have its sources, which come before it; so nothing can go in circles."""
    position = {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        tensor = tensors[node]
        if not tensor.is_computed:
            continue
        if tensor.buffer is None:
            raise RemoteProtocolError(f"node {tensor.name!r} ({tensor.op.name}) has no memory here")
        for source in tensor.src:
            if source < 0 or source == node:  # a cast is its own target
                continue
            if tensors[source].buffer is None:
                raise RemoteProtocolError(f"node {tensor.name!r} reads {tensors[source].name!r}, which is not here")
            if position.get(source, -1) > i and tensors[source].op not in VIEW_OPS:
                raise RemoteProtocolError(f"node {tensor.name!r} reads {tensors[source].name!r} before it is computed")


def _label(tensor: RpcTensor) -> str:
    return repr(tensor.name.decode(errors="replace")) if tensor.name else f"{tensor.id:#x}"
