"""Rules of matrix products, attention and rotation."""

from __future__ import annotations

import math

from app.engine.ggml import GGMLType, RopeMode
from app.engine.ggml import Op as O
from app.engine.opcheck.node import FLOATS, STORABLE, WEIGHTS, NodeCheck
from app.engine.opcheck.rules_elementwise import check_slopes_and_sinks

F32, F16, I32 = GGMLType.F32, GGMLType.F16, GGMLType.I32

#: Modes whose positions come in four runs, and whose pairs are split into sections.
SECTION_MODES = frozenset({RopeMode.MROPE, RopeMode.VISION, RopeMode.IMROPE})


def mul_mat(n: NodeCheck) -> None:
    n.takes(2)
    a, b = n.src(0), n.src(1)
    n.type_in(a, WEIGHTS, "the matrix")
    n.type_in(b, FLOATS, "source 1")
    n.require(a.ne[0] == b.ne[0], f"rows of {a.ne[0]} and of {b.ne[0]} elements do not multiply")
    n.require(
        b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0,
        f"a matrix of shape {list(a.ne)} does not serve {list(b.ne)} in the outer dimensions",
    )
    n.packed(a, "the matrix")
    n.packed(b, "source 1")
    n.fresh_f32((a.ne[1], b.ne[1], b.ne[2], b.ne[3]))


def mul_mat_id(n: NodeCheck) -> None:
    n.takes(3)
    a, b, ids = n.src(0), n.src(1), n.src(2)
    n.type_in(a, WEIGHTS, "the matrices")
    n.all_f32(b)
    n.type_in(ids, (I32,), "the ids")
    n.require(a.ne[3] == b.ne[3] == 1 and ids.ne[2] == ids.ne[3] == 1, "an operand has too many dimensions")
    n.require(a.ne[0] == b.ne[0], f"rows of {a.ne[0]} and of {b.ne[0]} elements do not multiply")
    n.require(ids.ne[1] == b.ne[2], f"ids for {ids.ne[1]} tokens, source 1 has {b.ne[2]}")
    n.require(ids.ne[0] % b.ne[1] == 0, f"{b.ne[1]} rows per token do not serve {ids.ne[0]} experts")
    n.require(ids.ne[0] * ids.ne[1] < 1 << 31, f"kernels count in 32 bits, the ids are {list(ids.ne)}")
    n.packed(a, "the matrices")
    n.packed(b, "source 1")
    n.fresh_f32((a.ne[1], ids.ne[0], ids.ne[1], 1))


def flash_attn_ext(n: NodeCheck) -> None:
    n.takes(3, optional=(3, 4))
    q, k, v = n.src(0), n.src(1), n.src(2)
    mask, sinks = n.optional(3), n.optional(4)
    n.all_f32(q)
    n.type_in(k, STORABLE, "k")
    n.type_in(v, STORABLE, "v")
    for tensor, what in ((q, "q"), (k, "k"), (v, "v")):
        n.packed(tensor, what)
    n.require(q.ne[0] == k.ne[0], f"q has heads of {q.ne[0]}, k of {k.ne[0]}")
    n.require(k.ne[1:] == v.ne[1:], f"k {list(k.ne)} and v {list(v.ne)} do not hold the same cells and heads")
    n.require(q.ne[2] % k.ne[2] == 0, f"{q.ne[2]} query heads on {k.ne[2]} key heads")
    n.require(q.ne[3] == k.ne[3], f"q has {q.ne[3]} streams, k has {k.ne[3]}")
    n.fresh_f32((v.ne[0], q.ne[2], q.ne[1], q.ne[3]))
    if mask is not None:
        n.type_in(mask, (F16,), "the mask")
        n.contiguous(mask, "the mask")
        fits = mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1]
        n.require(fits, f"the mask {list(mask.ne)} does not fit {q.ne[1]} queries and {k.ne[1]} cells")
        n.require(q.ne[2] % mask.ne[2] == 0 and q.ne[3] % mask.ne[3] == 0, "the mask does not tile heads and streams")
    if sinks is not None:
        n.all_f32(sinks)
        n.shape_is(sinks, (q.ne[2], 1, 1, 1), "the sinks")
        n.contiguous(sinks, "the sinks")
    n.require(math.isfinite(n.param_f32(0)), f"the scale is {n.param_f32(0)}")
    n.require(math.isfinite(n.param_f32(2)) and n.param_f32(2) >= 0, f"the soft cap is {n.param_f32(2)}")
    check_slopes_and_sinks(n, heads=q.ne[2], max_bias=n.param_f32(1), has_mask=mask is not None)


def rope(n: NodeCheck) -> None:
    n.takes(2, optional=(2,))
    x, positions, factors = n.src(0), n.src(1), n.optional(2)
    n_dims, mode, first = n.param(1), n.param(2), n.param(15)
    n.type_in(x, (F32, F16), "source 0")
    n.type_in(n.tensor, (x.type,), "the result")
    n.shape_is(n.tensor, x.ne, "the result")
    n.packed(x, "source 0")
    n.packed(n.tensor, "the result")
    n.require(mode in set(RopeMode), f"there is no rope mode {mode}")
    n.require(n_dims > 0 and n_dims % 2 == 0, f"it rotates {n_dims} dimensions, that must be even and more than none")
    n.require(first >= 0 and first % 2 == 0, f"the first rotated channel is {first}")
    vision = mode == RopeMode.VISION
    if vision:
        n.require(2 * n_dims == x.ne[0] and first == 0, f"vision mode rotates all {x.ne[0]} channels, not {2 * n_dims}")
    else:
        n.require(first + n_dims <= x.ne[0], f"channels {first} to {first + n_dims} of {x.ne[0]}")
    runs = 4 if mode in SECTION_MODES else 1
    n.type_in(positions, (I32,), "the positions")
    n.shape_is(positions, (runs * x.ne[2], 1, 1, 1), "the positions")
    n.contiguous(positions, "the positions")
    if factors is not None:
        n.all_f32(factors)
        pairs = n_dims if vision else n_dims // 2
        n.require(
            factors.ne[0] >= pairs and factors.ne[1:] == (1, 1, 1), f"{list(factors.ne)} factors for {pairs} pairs"
        )
        n.contiguous(factors, "the factors")
    numbers = [n.param_f32(i) for i in range(5, 11)]
    n.require(all(map(math.isfinite, numbers)), f"a parameter is not finite: {numbers}")
    base, scale, extension, _, beta_fast, beta_slow = numbers
    n.require(base > 0, f"the frequency base is {base}")
    if extension != 0:
        sound = base > 1 and scale > 0 and beta_fast > 0 and beta_slow > 0 and n.param(4) > 0
        n.require(sound, "the parameters of its context extension make no sense")
    if mode in SECTION_MODES:
        sections = [n.param(i) for i in range(11, 15)]
        # Three times their sum must fit 32 bits: kernels count in them.
        n.require(min(sections) >= 0 and 0 < 3 * sum(sections) < 1 << 31, f"the sections are {sections}")


RULES = {O.MUL_MAT: mul_mat, O.MUL_MAT_ID: mul_mat_id, O.FLASH_ATTN_EXT: flash_attn_ext, O.ROPE: rope}
