"""The bytes of the ggml RPC wire: command numbers, packed structs and the tensor record. No sockets, no state.

Everything is little-endian and packed. A request is `cmd u8 | size u64 | body`, an answer `size u64 | body`.
Versions 6.0 and 7.0 differ in SET_TENSOR alone; see `messages`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from app.engine.ggml import MAX_NAME_BYTES, MAX_OP_PARAMS, MAX_SRC, GGMLType

REQUEST_HEADER = struct.Struct("<BQ")
ANSWER_HEADER = struct.Struct("<Q")

#: rpc_tensor: id, type, buffer, ne[4], nb[4], op, op_params[16], flags, src[10], view_src, view_offs, data, name[64],
#: use_count.
TENSOR_FORMAT = f"QIQ4I4II{MAX_OP_PARAMS}ii{MAX_SRC}QQQQ{MAX_NAME_BYTES}si"
TENSOR = struct.Struct(f"<{TENSOR_FORMAT}")
TENSOR_BYTES = TENSOR.size

U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1

#: Capability bytes of HELLO. Always zeros from us: a stock worker with RDMA reads anything else as RDMA parameters.
CONN_CAPS_BYTES = 24
NO_CAPS = bytes(CONN_CAPS_BYTES)

#: HELLO's pad byte from a Tandem worker. Stock clients ignore it; we send extension commands only after seeing it.
TANDEM_PAD = 0x54

#: An answer of this announced size is an error notice of a Tandem worker: u32 length and UTF-8 text, then it hangs up.
ERROR_NOTICE = U64_MAX
ERROR_NOTICE_LENGTH = struct.Struct("<I")
MAX_ERROR_NOTICE_BYTES = 4096

ZERO_PARAMS = (0,) * MAX_OP_PARAMS
ZERO_SRC = (0,) * MAX_SRC


class Command(IntEnum):
    """Command numbers. From 128 on they are Tandem's own."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17
    # Tandem's own
    AUTH_CHALLENGE = 128
    DESCRIBE = 129
    GRAPH_STORE = 130
    GRAPH_RUN = 131
    GRAPH_DROP = 132
    WRITE_BATCH = 133
    READ_REGION = 134
    PING = 135
    AUTH_PROVE = 136
    PUSH_ACCEPT = 137
    PUSH_CONNECT = 138
    PUSH_ATTACH = 139
    PUSH = 140
    PUSH_TAKE = 141
    PUSH_DATA = 142
    READ_ROWS = 143
    TAKE_TURN = 144
    PUSH_TURN = 145
    WRITE_MASK = 146


FIRST_EXTENSION = 128


@dataclass(frozen=True, slots=True)
class RpcTensor:
    """One rpc_tensor record. Numbers are as on the wire: `type` and `op` may be unknown, ids are opaque.

    `ne` and `nb` have four entries, `params` sixteen signed words, `src` ten ids (0: none); `name` is without padding.
    """

    id: int = 0
    type: int = 0
    buffer: int = 0
    ne: tuple[int, int, int, int] = (1, 1, 1, 1)
    nb: tuple[int, int, int, int] = (0, 0, 0, 0)
    op: int = 0
    params: tuple[int, ...] = ZERO_PARAMS
    flags: int = 0
    src: tuple[int, ...] = ZERO_SRC
    view_src: int = 0
    view_offs: int = 0
    data: int = 0
    name: bytes = b""
    use_count: int = 0

    def values(self) -> tuple[int | bytes, ...]:
        """The 44 values of `TENSOR_FORMAT`, in order."""
        return (
            *(self.id, self.type, self.buffer, *self.ne, *self.nb, self.op, *self.params, self.flags, *self.src),
            *(self.view_src, self.view_offs, self.data, self.name, self.use_count),
        )


#: How many values one tensor record has in a struct.
TENSOR_VALUES = len(RpcTensor().values())


def tensor_from_values(values: tuple[int | bytes, ...]) -> RpcTensor:
    """The reverse of `RpcTensor.values`."""
    v: Any = values
    name: bytes = v[42]
    return RpcTensor(
        *(v[0], v[1], v[2], (v[3], v[4], v[5], v[6]), (v[7], v[8], v[9], v[10]), v[11], v[12:28], v[28], v[29:39]),
        *(v[39], v[40], v[41], name.partition(b"\0")[0], v[43]),
    )


def region(remote_ptr: int, address: int, size_bytes: int) -> RpcTensor:
    """A run of bytes as a one-dimensional I8 tensor: how memory is named when no graph is involved."""
    strides = (1, size_bytes, size_bytes, size_bytes)
    return RpcTensor(id=1, type=GGMLType.I8, buffer=remote_ptr, ne=(size_bytes, 1, 1, 1), nb=strides, data=address)
