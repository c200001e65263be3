"""Bytes that real peers said, kept in `vectors`: read, understood, and written again byte for byte."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest

from app.engine.ggml import Op
from app.engine.program import Buffer
from app.rpc import messages as m
from app.rpc.lower import Mapped, decode_graph
from app.rpc.protocol import AnswerParser, RequestParser, encode, encode_answer
from app.rpc.specs import SPECS, decode_answer
from app.rpc.wire import TENSOR, Command, tensor_from_values

VECTORS = Path(__file__).parent / "vectors"
VERSIONS = sorted({path.name.partition("-")[0] for path in VECTORS.glob("*-requests.bin.gz")})

#: What `tests.interop.capture` asked, in order.
QUESTIONS = (
    Command.HELLO,
    Command.DEVICE_COUNT,
    Command.GET_ALIGNMENT,
    Command.GET_MAX_SIZE,
    Command.ALLOC_BUFFER,
    Command.BUFFER_GET_BASE,
    Command.GET_TENSOR,
    Command.COPY_TENSOR,
    Command.GET_DEVICE_MEMORY,
    Command.GET_ALIGNMENT,
)


#: What the graph of each vector computes, among other things: a small one by hand, and a layer of a model.
GRAPH_OPS = {
    "6.0": {Op.ADD, Op.RMS_NORM, Op.MUL_MAT},
    "7.0": {Op.RMS_NORM, Op.MUL_MAT, Op.ROPE, Op.SET_ROWS, Op.FLASH_ATTN_EXT, Op.GLU},
}


def vector(version: str, name: str) -> bytes:
    return gzip.decompress((VECTORS / f"{version}-{name}.bin.gz").read_bytes())


def spoken(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def requests(version: str) -> list[tuple[Any, bytes]]:
    """Every request with its bulk data. The vector joins several connections; each began with HELLO."""
    found: list[tuple[Any, bytes]] = []
    data = vector(version, "requests")
    hello = encode(m.Hello(), spoken(version))
    parser = RequestParser(spoken(version))
    for part in data.split(hello):
        if part == b"" and not found:
            continue
        parser = RequestParser(spoken(version))
        parser.feed(hello + part)
        while (request := parser.next_request()) is not None:
            if isinstance(request, m.GraphCompute):
                request = m.GraphCompute(request.device, memoryview(bytes(request.graph)))
            found.append((request, bytes(parser.take_payload(1 << 30))))
        assert not parser.mid_request
    return found


def test_both_versions_are_here() -> None:
    assert VERSIONS == ["6.0", "7.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_stock_client_says_is_written_again_byte_for_byte(version: str) -> None:
    data = vector(version, "requests")
    written = bytearray()
    for request, payload in requests(version):
        tail = bytes(request.graph) if isinstance(request, m.GraphCompute) else payload
        written += encode(request, spoken(version), len(tail)) + tail
    assert bytes(written) == data


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stock_client_says_what_the_protocol_names(version: str) -> None:
    seen = {request.command for request, _ in requests(version)}
    usual = {
        Command.HELLO, Command.DEVICE_COUNT, Command.GET_DEVICE_MEMORY, Command.ALLOC_BUFFER, Command.GET_ALIGNMENT,
        Command.BUFFER_GET_BASE, Command.SET_TENSOR, Command.GRAPH_COMPUTE, Command.GET_TENSOR, Command.GET_MAX_SIZE,
    }  # fmt: skip
    assert usual <= seen


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stock_clients_graph_is_understood(version: str) -> None:
    graph = next(request for request, _ in requests(version) if isinstance(request, m.GraphCompute)).graph
    (n_nodes,) = struct.unpack_from("<I", graph)
    records = graph[8 + 8 * n_nodes :]
    tensors = [tensor_from_values(values) for values in TENSOR.iter_unpack(records)]
    assert b"".join(TENSOR.pack(*tensor.values()) for tensor in tensors) == bytes(records)
    ends: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.buffer:
            first, last = ends.get(tensor.buffer, (tensor.data, 0))
            ends[tensor.buffer] = (min(first, tensor.data), max(last, tensor.data + (1 << 24)))
    buffers = {ptr: Mapped(Buffer("far", last - first), first, 0) for ptr, (first, last) in ends.items()}
    program = decode_graph(graph, buffers, 0, "stock")
    computed = [program.tensors[node] for node in program.nodes if program.tensors[node].is_computed]
    assert GRAPH_OPS[version] <= {tensor.op for tensor in computed}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_stock_worker_says_is_understood(version: str) -> None:
    data = vector(version, "answers")
    parser = AnswerParser()
    parser.feed(data)
    said: dict[Command, Any] = {}
    written = bytearray()
    for command in QUESTIONS:
        spec = SPECS[spoken(version)][command]
        fixed = 16 if spec.answer is None else spec.answer.fixed_bytes
        size = parser.begin(command.name, fixed, fixed)
        assert size is not None
        body = parser.take_body(size)
        assert body is not None
        said[command] = decode_answer(spec, memoryview(bytes(body)))
        if spec.answer is None:
            written += struct.pack("<Q", size) + bytes(said[command])
        else:
            written += encode_answer(spec.answer, said[command])
    assert parser.buffered == 0
    assert bytes(written) == data
    hello = said[Command.HELLO]
    assert (hello.major, hello.minor, hello.pad) == (*spoken(version), 0)
    assert said[Command.ALLOC_BUFFER].size_bytes == 1024
    assert struct.unpack("<4f", said[Command.GET_TENSOR]) == (0, 2, 4, 6)
    assert said[Command.COPY_TENSOR] == m.Value(1)
