"""Programs survive the wire; what is not this connection's stays home; what does not fit is refused; lies are seen."""

from __future__ import annotations

import struct
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.ggml import GGMLType, Op, TensorFlag
from app.engine.program import Buffer, PlacedTensor, Program
from app.errors import RemoteProtocolError, UnsupportedOp
from app.rpc.lower import Address, Mapped, decode_graph, encode_graph
from app.rpc.wire import TENSOR, TENSOR_BYTES
from tests.rpc.programs import placed, sum_program

BASE, PTR = 0x7F00_0000, 0xB0F
BUFFER = Buffer("there", 1 << 20)
MAPPED = {PTR: Mapped(BUFFER, BASE, 0)}


def locate(buffer: Buffer) -> Address | None:
    return Address(PTR, BASE) if buffer is BUFFER else None


def there_and_back(program: Program) -> Program:
    return decode_graph(memoryview(encode_graph(program, locate, "RPC0")), MAPPED, 0, program.name)


def trimmed(tensor: PlacedTensor) -> PlacedTensor:
    """As it looks after the wire: sixteen parameters, no sources at the end that are not there."""
    src = tensor.src
    while src and src[-1] == -1:
        src = src[:-1]
    return replace(tensor, params=(*tensor.params, *[0] * (16 - len(tensor.params))), src=src)


def test_a_program_survives() -> None:
    program = sum_program(BUFFER)
    tensors = (
        *program.tensors,
        placed(BUFFER, 260, name="part", ne=(2, 1, 1, 1), op=Op.VIEW, src=(2,), view=(2, 4), params=(4,)),
        placed(None, name="elsewhere", type_=GGMLType.F16, op=Op.MUL, flags=TensorFlag.COMPUTE, src=(0, -1)),
        placed(BUFFER, 512, name="weight", type_=GGMLType.Q4_K, ne=(256, 3, 1, 1), use_count=2),
    )
    sent = Program("p", tensors, (2, 3))
    assert there_and_back(sent) == Program("p", tuple(map(trimmed, tensors)), (2, 3))


def test_a_buffer_of_another_place_is_not_named() -> None:
    stranger = Buffer("elsewhere", 1 << 20)
    program = Program("p", (placed(stranger, 64), placed(BUFFER, 64)), ())
    graph = encode_graph(program, locate, "RPC0")
    first, second = TENSOR.iter_unpack(graph[8:])
    assert (first[2], first[41]) == (0, 0)
    assert (second[2], second[41]) == (PTR, BASE + 64)


NAMES = st.text(min_size=0, max_size=12).filter(lambda name: "\0" not in name)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any tensors that lie inside the buffer; nodes are leaves and views, which need no order."""
    tensors: list[PlacedTensor] = []
    for i in range(draw(st.integers(1, 12))):
        type_ = draw(st.sampled_from([GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.I64, GGMLType.I8]))
        ne = (32 * draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))
        tensors.append(
            placed(
                draw(st.sampled_from([BUFFER, BUFFER, None])),
                8 * draw(st.integers(0, 1000)),
                name=draw(NAMES),
                type_=type_,
                ne=ne,
                op=draw(st.sampled_from([Op.NONE, Op.RESHAPE, Op.ADD])),
                params=tuple(draw(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=16))),
                flags=draw(st.sampled_from([TensorFlag.NONE, TensorFlag.INPUT, TensorFlag.OUTPUT])),
                src=tuple(draw(st.lists(st.integers(-1, i), max_size=10))),
                use_count=draw(st.integers(0, 9)),
            )
        )
        if tensors[-1].buffer is None:
            tensors[-1] = replace(tensors[-1], offset=0)
    nodes = draw(st.lists(st.integers(0, len(tensors) - 1), unique=True))
    return Program("any", tuple(tensors), tuple(nodes))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_any_program_survives(program: Program) -> None:
    got = there_and_back(program)
    assert got.nodes == program.nodes
    assert got.tensors == tuple(map(trimmed, program.tensors))


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_a_changed_byte_is_refused_or_harmless(program: Program, data: st.DataObject) -> None:
    graph = encode_graph(program, locate, "RPC0")
    for _ in range(data.draw(st.integers(1, 4))):
        graph[data.draw(st.integers(0, len(graph) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = decode_graph(memoryview(graph), MAPPED, 0, "any")
    except RemoteProtocolError:
        return
    for tensor in got.tensors:
        if tensor.buffer is not None:
            assert tensor.buffer is BUFFER
            assert 0 <= tensor.offset <= tensor.offset + tensor.n_bytes <= BUFFER.size_bytes


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=1200))
def test_any_bytes_are_refused_or_harmless(graph: bytes) -> None:
    try:
        decode_graph(memoryview(graph), MAPPED, 0, "any")
    except RemoteProtocolError:
        pass


# -- what the wire cannot carry -----------------------------------------------------------------------------------


def test_a_stride_of_four_gibibytes_is_refused() -> None:
    big = placed(None, name="cache", type_=GGMLType.F16, ne=(128, 8, 2097154, 2))
    assert big.nb == (2, 256, 2048, 4294971392)
    with pytest.raises(UnsupportedOp, match="'cache' has a stride of 4294971392 bytes in dimension 3"):
        encode_graph(Program("p", (big,), ()), locate, "RPC0")


def test_a_stride_that_nobody_uses_may_be_replaced() -> None:
    big = placed(None, name="cache", type_=GGMLType.F16, ne=(128, 8, 2097154, 1))
    graph = encode_graph(Program("p", (big,), ()), locate, "RPC0")
    assert struct.unpack_from("<4I", graph, 8 + 36) == (2, 256, 2048, 2048)


def test_an_extent_of_more_than_32_bits_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="has 4294967301 elements in dimension 0"):
        encode_graph(Program("p", (placed(None, ne=((1 << 32) + 5, 1, 1, 1)),), ()), locate, "RPC0")


# -- lies -----------------------------------------------------------------------------------------------------------


def refused(program: Program, match: str) -> None:
    graph = encode_graph(program, locate, "RPC0")
    with pytest.raises(RemoteProtocolError, match=match):
        decode_graph(memoryview(graph), MAPPED, 0, "lie")


def add(a: int, b: int, offset: int = 256, name: str = "r") -> PlacedTensor:
    return placed(BUFFER, offset, name=name, op=Op.ADD, src=(a, b), flags=TensorFlag.COMPUTE)


LEAF = placed(BUFFER, 0, name="a")


def test_a_node_before_its_source() -> None:
    refused(Program("p", (LEAF, add(0, 2), add(0, 0, 512, "late")), (1, 2)), "reads 'late' before it is computed")


def test_nodes_in_a_circle() -> None:
    refused(Program("p", (add(1, 1), add(0, 0, 512)), (0, 1)), "before it is computed")


def test_a_node_listed_twice() -> None:
    refused(Program("p", (LEAF, add(0, 0)), (1, 1)), "listed twice")


def test_views_in_a_circle() -> None:
    view = placed(BUFFER, 0, name="v", op=Op.VIEW, view=(1, 0))
    refused(Program("p", (view, replace(view, view_src=0)), ()), "views itself")


def test_a_view_that_leaves_what_it_views() -> None:
    outside = placed(BUFFER, 8, name="v", op=Op.VIEW, view=(0, 8))
    refused(Program("p", (LEAF, outside), ()), "view 'v' does not lie inside 'a'")
    before = replace(outside, offset=0)
    refused(Program("p", (replace(LEAF, offset=8), before), ()), "view 'v' does not lie inside 'a'")


def test_reading_what_is_elsewhere() -> None:
    refused(Program("p", (placed(None, name="far"), add(0, 0)), (1,)), "reads 'far', which is not here")


def test_computing_what_has_no_memory() -> None:
    refused(Program("p", (LEAF, replace(add(0, 0), buffer=None, offset=0)), (1,)), "has no memory here")


def test_a_stride_shorter_than_an_element() -> None:
    refused(Program("p", (placed(BUFFER, nb=(0, 16, 16, 16)),), ()), "has strides")
    refused(Program("p", (placed(BUFFER, nb=(4, 18, 18, 18)),), ()), "has strides")


def test_half_a_block() -> None:
    half = placed(BUFFER, type_=GGMLType.Q8_0, ne=(32, 1, 1, 1))
    refused(Program("p", (replace(half, ne=(33, 1, 1, 1)),), ()), "rows of 33")
    refused(Program("p", (replace(half, nb=(33, 34, 34, 34)),), ()), "33 bytes per block")


def test_a_cast_may_name_itself() -> None:
    cast = placed(
        BUFFER, 64, name="c", type_=GGMLType.F16, op=Op.CPY, src=(0, 1), flags=TensorFlag.COMPUTE, view=(-1, 0)
    )
    program = Program("p", (LEAF, cast), (1,))
    assert there_and_back(program).tensors[1].src == (0, 1)


# -- speed ----------------------------------------------------------------------------------------------------------


def test_a_graph_of_500_tensors_is_encoded_in_a_few_milliseconds() -> None:
    tensors = (LEAF,) + tuple(add(0, i, 16 * i, f"node-{i}") for i in range(500))
    program = Program("p", tensors, tuple(range(1, 501)))
    best = min(_seconds(program) for _ in range(5))
    assert len(encode_graph(program, locate, "RPC0")) == 8 + 8 * 500 + 501 * TENSOR_BYTES
    assert best < 0.05  # 2 ms on a quiet machine


def _seconds(program: Program) -> float:
    began = time.perf_counter()
    encode_graph(program, locate, "RPC0")
    return time.perf_counter() - began
