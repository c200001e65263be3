"""The graph builder: shapes, strides, parameters and aliases of every op."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest

from app.engine.builder import GraphBuilder, float_word
from app.engine.ggml import GGMLType, GluOp, Op, RopeMode, SortOrder, TensorFlag, UnaryOp
from app.engine.graph import Tensor, leaf
from app.engine.rope import RopeParams

F32, F16, I32, I64, Q8_0 = GGMLType.F32, GGMLType.F16, GGMLType.I32, GGMLType.I64, GGMLType.Q8_0


def f32(*dims: int) -> Tensor:
    return leaf(F32, dims, "x")


def words(*values: float) -> tuple[int, ...]:
    return tuple(map(float_word, values))


def test_floats_are_the_bits_of_a_32_bit_float() -> None:
    assert float_word(1.0) == 0x3F800000
    assert float_word(-2.5) == struct.unpack("<i", struct.pack("<f", -2.5))[0] < 0
    assert float_word(math.inf) == 0x7F800000
    assert float_word(0.1) == 0x3DCCCCCD


def test_nodes_stand_in_call_order_and_are_computed_unless_they_only_rename() -> None:
    g = GraphBuilder()
    a = g.rms_norm(f32(8, 3), 1e-5)
    b = g.reshape(a, 4, 6)
    c = g.add(b, b)
    assert g.graph.nodes == [a, b, c]
    assert a.flags & TensorFlag.COMPUTE and c.flags & TensorFlag.COMPUTE and not b.flags & TensorFlag.COMPUTE
    assert g.label(c, "sum") is c and c.name == "sum"
    assert g.output(c).flags & TensorFlag.OUTPUT


def test_views_of_views_point_at_the_owner_of_the_memory() -> None:
    g = GraphBuilder()
    owner = f32(16, 8)
    window = g.view(owner, (4, 2, 3), (64, 128), offset=32)
    assert (window.ne, window.nb, window.view_src, window.view_offs) == ((4, 2, 3, 1), (4, 64, 128, 384), owner, 32)
    assert window.params == (32, 0)
    inner = g.view(window, (2,), offset=8)
    assert inner.view_src is owner and inner.view_offs == 40 and inner.src == (window,) and inner.params == (8, 0)
    turned = g.permute(window, 0, 2, 1, 3)
    assert (turned.ne, turned.nb) == ((4, 3, 2, 1), (4, 128, 64, 384))
    assert turned.view_src is owner and turned.view_offs == 32 and turned.params == (0, 2, 1, 3)
    flat = g.transpose(owner)
    assert (flat.ne, flat.nb, flat.params) == ((8, 16, 1, 1), (64, 4, 512, 512), ())


def test_permute_puts_dimension_i_at_axis_i() -> None:
    turned = GraphBuilder().permute(f32(2, 3, 5, 7), 1, 2, 0, 3)
    assert turned.ne == (5, 2, 3, 7)


def test_offsets_beyond_four_gigabytes_take_two_words() -> None:
    g = GraphBuilder()
    view = g.view(leaf(F32, (1 << 20, 1 << 12), "big"), (4,), offset=(1 << 32) + 0x80000000)
    assert view.params == (-0x80000000, 1) and view.view_offs == (1 << 32) + 0x80000000


def test_strides_not_given_are_packed() -> None:
    g = GraphBuilder()
    assert g.view(f32(64), (4, 3, 2)).nb == (4, 16, 48, 96)
    assert g.view(f32(64), (4, 3, 2), (20,)).nb == (4, 20, 60, 120)
    assert g.view(leaf(Q8_0, (64, 8), "k"), (32, 2, 8), (34, 68)).nb == (34, 34, 68, 544)


def test_ops_that_write_into_another_tensor_alias_it() -> None:
    g = GraphBuilder()
    cache, rows, ids = leaf(F16, (64, 256), "cache"), f32(64, 3), leaf(I64, (3,), "ids")
    stored = g.set_rows(cache, rows, ids)
    assert stored.view_src is cache and stored.ne == cache.ne and stored.type is F16
    assert stored.src == (rows, ids, cache)
    part = g.view(cache, (64, 3), offset=128)
    copied = g.cpy(rows, part)
    assert copied.view_src is cache and copied.view_offs == 128 and copied.src == (rows, part)


ROPE = RopeParams(8, RopeMode.IMROPE, 4096, 1e6, 0.25, 1.0, 0.5, 16.0, 2.0, (3, 3, 2, 0))
#: What is built, and the type, shape and parameters it must have.
RESULTS: list[tuple[Callable[[GraphBuilder], Tensor], Op, GGMLType, tuple[int, ...], tuple[int, ...]]] = [
    (lambda g: g.mul_mat(leaf(Q8_0, (64, 10), "w"), f32(64, 3, 4, 2)), Op.MUL_MAT, F32, (10, 3, 4, 2), (0,)),
    (lambda g: g.mul_mat(f32(8, 5, 2), f32(8, 3, 6)), Op.MUL_MAT, F32, (5, 3, 6, 1), (0,)),
    (
        lambda g: g.mul_mat_id(leaf(Q8_0, (32, 10, 6), "w"), f32(32, 1, 7), leaf(I32, (2, 7), "ids")),
        Op.MUL_MAT_ID,
        F32,
        (10, 2, 7, 1),
        (0,),
    ),
    (lambda g: g.rms_norm(f32(8, 3), 1e-5), Op.RMS_NORM, F32, (8, 3, 1, 1), words(1e-5)),
    (lambda g: g.norm(f32(8, 3), 1e-5), Op.NORM, F32, (8, 3, 1, 1), words(1e-5)),
    (lambda g: g.l2_norm(f32(8, 3), 1e-5), Op.L2_NORM, F32, (8, 3, 1, 1), words(1e-5)),
    (lambda g: g.add(f32(8, 3), f32(8)), Op.ADD, F32, (8, 3, 1, 1), ()),
    (lambda g: g.mul(f32(8, 3, 2), f32(1, 3)), Op.MUL, F32, (8, 3, 2, 1), ()),
    (lambda g: g.clamp(f32(8), 0.5, math.inf), Op.CLAMP, F32, (8, 1, 1, 1), words(0.5, math.inf)),
    (lambda g: g.scale(f32(8), 0.5), Op.SCALE, F32, (8, 1, 1, 1), words(0.5, 0.0)),
    (lambda g: g.scale(f32(8), 0.5, -1.0), Op.SCALE, F32, (8, 1, 1, 1), words(0.5, -1.0)),
    (lambda g: g.unary(UnaryOp.SILU, f32(8, 2)), Op.UNARY, F32, (8, 2, 1, 1), (10,)),
    (lambda g: g.glu(GluOp.SWIGLU, f32(8, 2), f32(8, 2)), Op.GLU, F32, (8, 2, 1, 1), (2, 0, 0, 0)),
    (lambda g: g.glu(GluOp.GEGLU, f32(8, 2)), Op.GLU, F32, (4, 2, 1, 1), (1, 0, 0, 0)),
    (
        lambda g: g.glu(GluOp.SWIGLU_OAI, f32(8), f32(8), alpha=1.702, limit=7.0),
        Op.GLU,
        F32,
        (8, 1, 1, 1),
        (3, 0, *words(1.702, 7.0)),
    ),
    (lambda g: g.sum_rows(f32(8, 3)), Op.SUM_ROWS, F32, (1, 3, 1, 1), ()),
    (lambda g: g.argsort(f32(8, 3)), Op.ARGSORT, I32, (8, 3, 1, 1), (1,)),
    (lambda g: g.argsort(f32(8, 3), SortOrder.ASC), Op.ARGSORT, I32, (8, 3, 1, 1), (0,)),
    (lambda g: g.soft_max(f32(8, 3), scale=0.25), Op.SOFT_MAX, F32, (8, 3, 1, 1), words(0.25, 0.0)),
    (
        lambda g: g.rope(f32(16, 4, 3), leaf(I32, (12,), "pos"), ROPE),
        Op.ROPE,
        F32,
        (16, 4, 3, 1),
        (0, 8, 40, 0, 4096, *words(1e6, 0.25, 1.0, 0.5, 16.0, 2.0), 3, 3, 2, 0),
    ),
    (
        lambda g: g.flash_attn_ext(
            f32(16, 3, 4),
            leaf(F16, (16, 256, 2), "k"),
            leaf(F16, (32, 256, 2), "v"),
            leaf(F16, (256, 3), "m"),
            scale=0.25,
        ),
        Op.FLASH_ATTN_EXT,
        F32,
        (32, 4, 3, 1),
        (*words(0.25, 0.0, 0.0), 10),
    ),
    (lambda g: g.get_rows(leaf(Q8_0, (64, 9), "w"), leaf(I32, (5,), "i")), Op.GET_ROWS, F32, (64, 5, 1, 1), ()),
    (lambda g: g.get_rows(f32(1, 8, 3), leaf(I32, (2, 3), "i")), Op.GET_ROWS, F32, (1, 2, 3, 1), ()),
    (lambda g: g.get_rows(leaf(I32, (4, 9), "t"), leaf(I32, (5,), "i")), Op.GET_ROWS, I32, (4, 5, 1, 1), ()),
    (lambda g: g.cont(g.transpose(f32(4, 6))), Op.CONT, F32, (6, 4, 1, 1), ()),
    (lambda g: g.cont(g.transpose(f32(4, 6)), 12, 2), Op.CONT, F32, (12, 2, 1, 1), ()),
    (lambda g: g.repeat(f32(4, 1, 3), 4, 5, 6), Op.REPEAT, F32, (4, 5, 6, 1), ()),
    (lambda g: g.concat(f32(4, 2), f32(4, 3), 1), Op.CONCAT, F32, (4, 5, 1, 1), (1,)),
    (
        lambda g: g.add_id(f32(8, 2, 3), f32(8, 6), leaf(I32, (2, 3), "ids")),
        Op.ADD_ID,
        F32,
        (8, 2, 3, 1),
        (),
    ),
    (lambda g: g.ssm_conv(f32(3 + 5, 8, 2), f32(4, 8)), Op.SSM_CONV, F32, (8, 5, 2, 1), ()),
    (
        lambda g: g.gated_delta_net(
            f32(4, 2, 5, 3), f32(4, 2, 5, 3), f32(4, 6, 5, 3), f32(1, 6, 5, 3), f32(1, 6, 5, 3), f32(4, 4, 6, 3)
        ),
        Op.GATED_DELTA_NET,
        F32,
        (24, 15 + 12, 1, 1),
        (1,),
    ),
]


@pytest.mark.parametrize("case", RESULTS, ids=lambda case: case[1].name)
def test_results(case: tuple[Callable[[GraphBuilder], Tensor], Op, GGMLType, tuple[int, ...], tuple[int, ...]]) -> None:
    make, op, type_, ne, params = case
    node = make(GraphBuilder())
    assert (node.op, node.type, node.ne, node.params) == (op, type_, ne, params)
    assert node.view_src is None and node.nb[0] == (2 if type_ is F16 else 4)
    assert node.nb[1:] == tuple(node.nb[0] * math.prod(ne[:i]) for i in (1, 2, 3))


REFUSED: list[tuple[Callable[[GraphBuilder], object], str]] = [
    (lambda g: g.mul_mat(f32(64, 10), f32(32, 3)), r"multiplied.*\[64, 10, 1, 1\] and .*\[32, 3, 1, 1\]"),
    (lambda g: g.mul_mat(f32(8, 5, 4), f32(8, 3, 6)), "multiplied"),
    (lambda g: g.mul_mat(g.transpose(f32(8, 4)), f32(4, 3)), "multiplied"),
    (lambda g: g.mul_mat_id(f32(8, 5, 4), f32(8, 1, 7), leaf(I32, (2, 6), "ids")), "experts"),
    (lambda g: g.add(f32(8, 3), f32(8, 2)), r"ADD cannot tile .*\[8, 3, 1, 1\] and .*\[8, 2, 1, 1\]"),
    (lambda g: g.reshape(f32(8, 3), 5, 5), r"reshaped to \[5, 5\]"),
    (lambda g: g.reshape(g.transpose(f32(8, 3)), 24), "contiguous"),
    (lambda g: g.view(f32(8, 3), (8, 4)), "larger than what it is on"),
    (lambda g: g.view(leaf(Q8_0, (64,), "k"), (16,)), "cuts a block"),
    (lambda g: g.permute(f32(8, 3), 0, 0, 1, 2), "not an order"),
    (lambda g: g.get_rows(f32(8, 3), leaf(I64, (2,), "ids")), "picked"),
    (lambda g: g.get_rows(f32(8, 3, 2), leaf(I32, (2,), "ids")), "picked"),
    (lambda g: g.set_rows(f32(8, 9), f32(8, 3), leaf(I64, (2,), "ids")), "stored"),
    (lambda g: g.set_rows(f32(8, 9), f32(4, 3), leaf(I64, (3,), "ids")), "stored"),
    (lambda g: g.cpy(f32(8, 9), f32(8, 3)), "as many elements"),
    (lambda g: g.cont(f32(8, 9), 70), "copied into"),
    (lambda g: g.repeat(f32(4, 2), 4, 3), "tiled"),
    (lambda g: g.concat(f32(4, 2), f32(3, 2), 1), "joined along dimension 1"),
    (lambda g: g.glu(GluOp.SWIGLU, f32(8), f32(4)), "SWIGLU needs equal"),
    (lambda g: g.glu(GluOp.SWIGLU, f32(7)), "halve"),
    (lambda g: g.rms_norm(g.transpose(f32(4, 8)), 1e-5), "packed"),
    (lambda g: g.rope(f32(16, 4, 3), leaf(I32, (3,), "pos"), ROPE), "4 positions per token"),
    (lambda g: g.rope(f32(4, 4, 3), leaf(I32, (12,), "pos"), ROPE), "cannot rotate 8"),
    (lambda g: g.rope(f32(16, 4, 3), leaf(I32, (12,), "pos"), ROPE, f32(3)), "factors"),
    (lambda g: g.soft_max(f32(8, 3), f32(8, 2)), "mask"),
    (lambda g: g.flash_attn_ext(f32(16, 3, 4), f32(16, 9, 3), f32(16, 9, 3), None, scale=1.0), "attention"),
    (lambda g: g.flash_attn_ext(f32(16, 3, 4), f32(16, 9, 2), f32(16, 9, 2), f32(9, 3), scale=1.0), "mask"),
    (lambda g: g.add_id(f32(8, 2, 3), f32(8, 6), leaf(I32, (3, 3), "ids")), "added"),
    (lambda g: g.ssm_conv(f32(8, 8), f32(4, 7)), "convolve"),
]


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_what_does_not_fit_is_refused_with_both_shapes(make: Callable[[GraphBuilder], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(GraphBuilder())
