"""Our graph builder against ggml's own constructors: shapes, strides, parameters and aliases word for word."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.engine.builder import GraphBuilder
from app.engine.ggml import GGMLType, GluOp, Op, RopeMode, UnaryOp
from app.engine.graph import Tensor, leaf
from app.engine.rope import RopeParams
from tests.interop.ggml_base import ggml_base

pytestmark = pytest.mark.interop

F32, F16, I32, I64, Q8_0 = GGMLType.F32, GGMLType.F16, GGMLType.I32, GGMLType.I64, GGMLType.Q8_0


class GGMLTensor(ctypes.Structure):
    """struct ggml_tensor, up to what we compare."""


GGMLTensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(GGMLTensor) * 10),
    ("view_src", ctypes.POINTER(GGMLTensor)),
    ("view_offs", ctypes.c_size_t),
]
Pointer = ctypes.POINTER(GGMLTensor)


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Upstream:
    """ggml's constructors on a context without memory; a leaf of ours stands for the same leaf there."""

    def __init__(self) -> None:
        self.lib = ggml_base()
        self.lib.ggml_init.restype = ctypes.c_void_p
        self.lib.ggml_init.argtypes = [InitParams]
        self.lib.ggml_free.argtypes = [ctypes.c_void_p]
        self.context = ctypes.c_void_p(self.lib.ggml_init(InitParams(1 << 24, None, True)))
        self._leaves: dict[int, Any] = {}

    def close(self) -> None:
        self.lib.ggml_free(self.context)

    def call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self.lib, f"ggml_{name}")
        function.restype = Pointer
        return function(self.context, *(self._convert(a) for a in arguments))

    def _convert(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if id(a) not in self._leaves:
                ne = (ctypes.c_int64 * 4)(*a.ne)
                self._leaves[id(a)] = self.call("new_tensor", int(a.type), 4, ne)
            return self._leaves[id(a)]
        if isinstance(a, float):
            return ctypes.c_float(a)
        if isinstance(a, bool) or a is None:
            return a
        if isinstance(a, int):
            return ctypes.c_int64(a)
        return a


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    yield made
    made.close()


def size(n: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(n)


def _rope(u: Upstream, x: Tensor, positions: Tensor, r: RopeParams) -> Any:
    floats = (r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow)
    if r.mode is RopeMode.IMROPE:
        sections = (ctypes.c_int * 4)(*r.sections)
        return u.call("rope_multi", x, positions, None, r.n_dims, sections, int(r.mode), r.n_ctx_orig, *floats)
    return u.call("rope_ext", x, positions, None, r.n_dims, int(r.mode), r.n_ctx_orig, *floats)


def _flash(u: Upstream, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    node = u.call("flash_attn_ext", q, k, v, mask, 0.25, 0.0, 0.0)
    u.lib.ggml_flash_attn_ext_set_prec(node, 10)
    return node


X, Y = leaf(F32, (64, 6, 4, 2), "x"), leaf(F32, (64, 6, 4, 2), "y")
ROW, W, EXPERTS = leaf(F32, (64,), "row"), leaf(Q8_0, (64, 10), "w"), leaf(Q8_0, (64, 10, 8), "experts")
TOKENS, IDS, MANY = leaf(F32, (64, 1, 5), "t"), leaf(I32, (3, 5), "ids"), leaf(F32, (64, 3, 5), "many")
CACHE, ROWS = leaf(F16, (64, 256), "cache"), leaf(I64, (24,), "rows")
FLAT, PICK = leaf(F32, (64, 24), "flat"), leaf(I32, (7,), "pick")
QUERY, MASK = leaf(F32, (64, 5, 4), "q"), leaf(F16, (256, 5), "mask")
KEYS, VALUES = leaf(F16, (64, 256, 2), "k"), leaf(F16, (32, 256, 2), "v")
HEADS, AT, AT4 = leaf(F32, (64, 4, 5), "heads"), leaf(I32, (5,), "at"), leaf(I32, (20,), "at4")
YARN = RopeParams(32, RopeMode.NEOX, 4096, 1e6, 0.25, 1.0, 0.5, 16.0, 2.0)
SECTIONS = RopeParams(64, RopeMode.IMROPE, 4096, 1e6, sections=(11, 11, 10, 0))
INNER = leaf(F32, (8 * 3 * 2,), "inner")
KEY, VALUE, GATE = leaf(F32, (4, 2, 5, 3), "k"), leaf(F32, (4, 6, 5, 3), "v"), leaf(F32, (1, 6, 5, 3), "g")
STATE, CONV, KERNEL = leaf(F32, (4, 4, 6, 3), "s"), leaf(F32, (8, 16, 2), "c"), leaf(F32, (4, 16), "kernel")

Pair = tuple[Callable[[GraphBuilder], Tensor], Callable[[Upstream], Any]]
PAIRS: dict[str, Pair] = {
    "mul_mat": (lambda g: g.mul_mat(W, X), lambda u: u.call("mul_mat", W, X)),
    "mul_mat_id": (lambda g: g.mul_mat_id(EXPERTS, TOKENS, IDS), lambda u: u.call("mul_mat_id", EXPERTS, TOKENS, IDS)),
    "add": (lambda g: g.add(X, ROW), lambda u: u.call("add", X, ROW)),
    "sub": (lambda g: g.sub(X, Y), lambda u: u.call("sub", X, Y)),
    "mul": (lambda g: g.mul(X, ROW), lambda u: u.call("mul", X, ROW)),
    "div": (lambda g: g.div(X, Y), lambda u: u.call("div", X, Y)),
    "add_id": (
        lambda g: g.add_id(MANY, leaf(F32, (64, 8), "b"), IDS),
        lambda u: u.call("add_id", MANY, leaf(F32, (64, 8), "b"), IDS),
    ),
    "scale": (lambda g: g.scale(X, 0.3), lambda u: u.call("scale", X, 0.3)),
    "scale_bias": (lambda g: g.scale(X, 0.3, 2.0), lambda u: u.call("scale_bias", X, 0.3, 2.0)),
    "clamp": (lambda g: g.clamp(X, -1.0, 2.0), lambda u: u.call("clamp", X, -1.0, 2.0)),
    "silu": (lambda g: g.unary(UnaryOp.SILU, X), lambda u: u.call("silu", X)),
    "softplus": (lambda g: g.unary(UnaryOp.SOFTPLUS, X), lambda u: u.call("softplus", X)),
    "swiglu": (lambda g: g.glu(GluOp.SWIGLU, X), lambda u: u.call("swiglu", X)),
    "geglu": (lambda g: g.glu(GluOp.GEGLU, X, Y), lambda u: u.call("geglu_split", X, Y)),
    "swiglu_oai": (
        lambda g: g.glu(GluOp.SWIGLU_OAI, X, Y, alpha=1.702, limit=7.0),
        lambda u: u.call("swiglu_oai", X, Y, 1.702, 7.0),
    ),
    "rms_norm": (lambda g: g.rms_norm(X, 1e-6), lambda u: u.call("rms_norm", X, 1e-6)),
    "norm": (lambda g: g.norm(X, 1e-6), lambda u: u.call("norm", X, 1e-6)),
    "l2_norm": (lambda g: g.l2_norm(X, 1e-6), lambda u: u.call("l2_norm", X, 1e-6)),
    "sum_rows": (lambda g: g.sum_rows(X), lambda u: u.call("sum_rows", X)),
    "argsort": (lambda g: g.argsort(X), lambda u: u.call("argsort", X, 1)),
    "soft_max": (lambda g: g.soft_max(X, scale=0.5), lambda u: u.call("soft_max_ext", X, None, 0.5, 0.0)),
    "rope yarn": (lambda g: g.rope(HEADS, AT, YARN), lambda u: _rope(u, HEADS, AT, YARN)),
    "rope sections": (lambda g: g.rope(HEADS, AT4, SECTIONS), lambda u: _rope(u, HEADS, AT4, SECTIONS)),
    "flash_attn_ext": (
        lambda g: g.flash_attn_ext(QUERY, KEYS, VALUES, MASK, scale=0.25),
        lambda u: _flash(u, QUERY, KEYS, VALUES, MASK),
    ),
    "get_rows": (lambda g: g.get_rows(W, PICK), lambda u: u.call("get_rows", W, PICK)),
    "set_rows": (lambda g: g.set_rows(CACHE, FLAT, ROWS), lambda u: u.call("set_rows", CACHE, FLAT, ROWS)),
    "cpy": (lambda g: g.cpy(X, Y), lambda u: u.call("cpy", X, Y)),
    "cont": (lambda g: g.cont(X), lambda u: u.call("cont", X)),
    "cont in a shape": (lambda g: g.cont(X, 128, 24), lambda u: u.call("cont_2d", X, 128, 24)),
    "repeat": (lambda g: g.repeat(X, 64, 12, 4, 2), lambda u: u.call("repeat_4d", X, 64, 12, 4, 2)),
    "concat": (lambda g: g.concat(X, Y, 2), lambda u: u.call("concat", X, Y, 2)),
    "reshape": (lambda g: g.reshape(X, 128, 24), lambda u: u.call("reshape_2d", X, 128, 24)),
    "view 1": (lambda g: g.view(X, (32,), offset=64), lambda u: u.call("view_1d", X, 32, size(64))),
    "view 2": (
        lambda g: g.view(X, (16, 3), (512,), 64),
        lambda u: u.call("view_2d", X, 16, 3, size(512), size(64)),
    ),
    "view 3": (
        lambda g: g.view(X, (16, 3, 2), (256, 2048), 64),
        lambda u: u.call("view_3d", X, 16, 3, 2, size(256), size(2048), size(64)),
    ),
    "view of a view": (
        lambda g: g.view(g.view(X, (32, 4), (256,), 64), (16, 3), (256,), 32),
        lambda u: u.call("view_2d", u.call("view_2d", X, 32, 4, size(256), size(64)), 16, 3, size(256), size(32)),
    ),
    "permute": (lambda g: g.permute(X, 1, 2, 0, 3), lambda u: u.call("permute", X, 1, 2, 0, 3)),
    "transpose": (lambda g: g.transpose(X), lambda u: u.call("transpose", X)),
    "ssm_conv": (lambda g: g.ssm_conv(CONV, KERNEL), lambda u: u.call("ssm_conv", CONV, KERNEL)),
    "gated_delta_net": (
        lambda g: g.gated_delta_net(KEY, KEY, VALUE, GATE, GATE, STATE),
        lambda u: u.call("gated_delta_net", KEY, KEY, VALUE, GATE, GATE, STATE, 1),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_node(name: str, upstream: Upstream) -> None:
    ours, theirs = PAIRS[name]
    node, want = ours(GraphBuilder()), theirs(upstream).contents
    assert node.op is Op(want.op) and node.type is GGMLType(want.type)
    assert list(node.ne) == list(want.ne) and list(node.nb) == list(want.nb)
    assert [*node.params, *[0] * (16 - len(node.params))] == list(want.op_params)
    assert (node.view_src is not None) == bool(want.view_src) and node.view_offs == want.view_offs
    sources = [bool(pointer) for pointer in want.src]
    assert [source is not None for source in node.src] == sources[: len(node.src)]
    assert not any(sources[len(node.src) :])
