"""Rules of convolutions over time, state-space scans and linear attention."""

from __future__ import annotations

import math

from app.engine.ggml import GGMLType
from app.engine.ggml import Op as O
from app.engine.opcheck.node import NodeCheck


def ssm_conv(n: NodeCheck) -> None:
    n.takes(2)
    x, kernel = n.src(0), n.src(1)
    n.all_f32(x, kernel)
    n.require(x.ne[3] == 1 and kernel.ne[2:] == (1, 1), "an operand has too many dimensions")
    n.require(x.ne[1] == kernel.ne[1], f"{x.ne[1]} channels, but kernels for {kernel.ne[1]}")
    n.require(x.ne[0] >= kernel.ne[0], f"{x.ne[0]} columns are fewer than the kernel's {kernel.ne[0]}")
    n.packed(x, "source 0")
    n.contiguous(kernel, "the kernel")
    n.fresh_f32((x.ne[1], x.ne[0] - kernel.ne[0] + 1, x.ne[2], 1))


def ssm_scan(n: NodeCheck) -> None:
    n.takes(7)
    state, x, dt, a, b, c, ids = (n.src(i) for i in range(7))
    n.all_f32(state, x, dt, a, b, c)
    n.type_in(ids, (GGMLType.I32,), "the ids")
    d_state, head_dim, heads, _ = state.ne
    tokens, sequences = x.ne[2], x.ne[3]
    n.shape_is(x, (head_dim, heads, tokens, sequences), "x")
    n.shape_is(dt, (heads, tokens, sequences, 1), "dt")
    n.shape_is(b, (d_state, b.ne[1], tokens, sequences), "b")
    n.shape_is(c, b.ne, "c")
    n.shape_is(ids, (sequences, 1, 1, 1), "the ids")
    n.require(heads % b.ne[1] == 0, f"{b.ne[1]} groups do not serve {heads} heads")
    n.require(a.ne[0] in {1, d_state} and a.ne[1:] == (heads, 1, 1), f"a has shape {list(a.ne)}")
    for tensor, what in ((state, "the state"), (dt, "dt"), (a, "a")):
        n.contiguous(tensor, what)
    for tensor, what in ((x, "x"), (b, "b"), (c, "c")):
        n.packed(tensor, what)
    snapshots = max(1, n.param(0))
    n.require(0 <= n.param(0) and (snapshots == 1 or a.ne[0] == 1), f"{n.param(0)} snapshots")
    outputs = head_dim * heads * tokens * sequences
    n.fresh_f32((outputs + snapshots * d_state * head_dim * heads * sequences, 1, 1, 1))


def gated_delta_net(n: NodeCheck) -> None:
    n.takes(6)
    q, k, v, g, beta, state = (n.src(i) for i in range(6))
    n.all_f32(q, k, v, g, beta, state)
    size, heads, tokens, sequences = v.ne
    n.require(k.ne == q.ne and q.ne[0] == size and q.ne[2] == tokens, f"q {list(q.ne)}, k {list(k.ne)}, v {list(v.ne)}")
    n.require(heads % q.ne[1] == 0 and sequences % q.ne[3] == 0, "the heads or sequences of q do not serve those of v")
    n.require(g.ne[0] in {1, size}, f"the decay has {g.ne[0]} values per head, it may have 1 or {size}")
    n.shape_is(g, (g.ne[0], heads, tokens, sequences), "the decay")
    n.shape_is(beta, (1, heads, tokens, sequences), "beta")
    n.require(state.n_elements == size * size * heads * sequences, f"the state has shape {list(state.ne)}")
    for tensor, what in ((q, "q"), (k, "k"), (v, "v")):
        n.packed(tensor, what)
    for tensor, what in ((g, "the decay"), (beta, "beta"), (state, "the state")):
        n.contiguous(tensor, what)
    n.require(n.param(0) >= 1, f"{n.param(0)} snapshots")
    n.fresh_f32((size * heads, tokens * sequences + n.param(0) * size * sequences, 1, 1))


def gated_linear_attn(n: NodeCheck) -> None:
    n.takes(5)
    k, v, q, g, state = (n.src(i) for i in range(5))
    n.all_f32(k, v, q, g, state)
    size, heads, tokens, _ = k.ne
    for tensor, what in ((v, "v"), (q, "q"), (g, "the decay")):
        n.shape_is(tensor, k.ne, what)
    n.require(k.ne[3] == 1, "k has four dimensions")
    sequences = state.n_elements // (size * size * heads)
    sound = sequences > 0 and state.n_elements == size * size * heads * sequences and tokens % sequences == 0
    n.require(sound, f"a state of {state.n_elements} elements does not fit {heads} heads of {size} and {tokens} tokens")
    for tensor, what in ((k, "k"), (v, "v"), (q, "q"), (g, "the decay"), (state, "the state")):
        n.contiguous(tensor, what)
    n.require(math.isfinite(n.param_f32(0)), f"the scale is {n.param_f32(0)}")
    n.fresh_f32((size * heads, tokens + size * sequences, 1, 1))


RULES = {
    O.SSM_CONV: ssm_conv,
    O.SSM_SCAN: ssm_scan,
    O.GATED_DELTA_NET: gated_delta_net,
    O.GATED_LINEAR_ATTN: gated_linear_attn,
}
