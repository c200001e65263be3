"""Cases of convolutions over time, state-space scans and linear attention, one step at a time."""

from __future__ import annotations

import math

import numpy as np

from app.engine.ggml import Op
from tests.contract.cases import F32, I32, CaseBuilder, op_case


@op_case("ssm-conv", (1, 1), (6, 2))
def ssm_conv(c: CaseBuilder, tokens: int, sequences: int) -> None:
    width, channels = 4, 5
    x, kernel = c.random(F32, width - 1 + tokens, channels, sequences), c.random(F32, width, channels)
    values, taps, want = c.values(x)[0], c.values(kernel)[0, 0], np.zeros((sequences, tokens, channels))
    for b, t, channel, k in np.ndindex(sequences, tokens, channels, width):
        want[b, t, channel] += values[b, channel, t + k] * taps[channel, k]
    c.expect(c.node(Op.SSM_CONV, F32, (channels, tokens, sequences), (x, kernel)), want, "product")


@op_case("ssm-scan", ("scalar", 1, 1, 0), ("scalar", 5, 2, 3), ("vector", 5, 2, 0), ("scalar", 2, 1, 4))
def ssm_scan(c: CaseBuilder, decay: str, tokens: int, sequences: int, snapshots: int) -> None:
    """x, B and C are views into one convolution's output; states are picked by id. Unwritten snapshots are left out."""
    d_state, head, heads, groups, slots = 4, 3, 4, 2, 3
    inner, shared = head * heads, groups * d_state
    mixed = c.random(F32, inner + 2 * shared, tokens, sequences)
    row, plane = mixed.nb[1], mixed.nb[2]
    x = c.view(mixed, (head, heads, tokens, sequences), (4, 4 * head, row, plane))
    b, cc = (
        c.view(mixed, (d_state, groups, tokens, sequences), (4, 4 * d_state, row, plane), offset)
        for offset in (4 * inner, 4 * (inner + shared))
    )
    state, dt = c.random(F32, d_state, head, heads, slots), c.random(F32, heads, tokens, sequences)
    a = c.leaf(F32, -c.rng.uniform(0.1, 2, (heads, d_state if decay == "vector" else 1)))
    ids = c.leaf(I32, np.array([2, 0])[:sequences])
    kept = max(1, snapshots)
    y = np.zeros((sequences, tokens, heads, head))
    saved = np.zeros((kept, sequences, heads, head, d_state))
    for i in range(sequences):
        s = c.values(state)[c.values(ids)[0, 0, 0, i]].copy()
        for t, h in np.ndindex(tokens, heads):
            g = h // (heads // groups)
            step = math.log1p(math.exp(c.values(dt)[0, i, t, h]))
            for r in range(head):
                s[h, r] = (
                    s[h, r] * np.exp(step * c.values(a)[0, 0, h])
                    + c.values(b)[i, t, g] * c.values(x)[i, t, h, r] * step
                )
                y[i, t, h, r] = s[h, r] @ c.values(cc)[i, t, g]
            if h == heads - 1 and tokens - 1 - t < kept:
                saved[tokens - 1 - t, i] = s
    total = y.size + saved.size
    out = c.node(Op.SSM_SCAN, F32, (total,), (state, x, dt, a, b, cc, ids), (snapshots,))
    written = min(kept, tokens)
    c.expect(c.view(out, (y.size,), (4, total * 4, total * 4, total * 4)), y, "product")
    part = saved[:written]
    c.expect(c.view(out, (part.size,), (4, total * 4, total * 4, total * 4), 4 * y.size), part, "product")


@op_case("gated-delta-net", ("scalar", 1, 1, 1), ("scalar", 6, 2, 1), ("vector", 6, 2, 3), ("scalar", 2, 1, 4))
def gated_delta_net(c: CaseBuilder, decay: str, tokens: int, sequences: int, snapshots: int) -> None:
    """Six value heads on two key heads (index modulo); q, k and v are views into one projection."""
    n, key_heads, heads = 8, 2, 6
    mixed = c.random(F32, n * (2 * key_heads + heads), tokens, sequences)
    row, plane = mixed.nb[1], mixed.nb[2]
    q, k = (
        c.view(mixed, (n, key_heads, tokens, sequences), (4, 4 * n, row, plane), offset)
        for offset in (0, 4 * n * key_heads)
    )
    v = c.view(mixed, (n, heads, tokens, sequences), (4, 4 * n, row, plane), 8 * n * key_heads)
    g = c.leaf(F32, -c.rng.uniform(0, 1, (sequences, tokens, heads, n if decay == "vector" else 1)))
    beta = c.leaf(F32, c.rng.uniform(0, 1, (sequences, tokens, heads, 1)))
    state = c.random(F32, n, n, heads, sequences)
    y, saved = np.zeros((sequences, tokens, heads, n)), np.zeros((snapshots, sequences, heads, n, n))
    for b, h in np.ndindex(sequences, heads):
        s = c.values(state)[b, h].T.copy()  # s[i, j]: key i, value j
        for t in range(tokens):
            key, query = c.values(k)[b, t, h % key_heads], c.values(q)[b, t, h % key_heads]
            s *= np.exp(c.values(g)[b, t, h])[:, None]
            d = c.values(beta)[b, t, h, 0] * (c.values(v)[b, t, h] - key @ s)
            s += np.outer(key, d)
            y[b, t, h] = query @ s / math.sqrt(n)
            if tokens - 1 - t < snapshots:
                saved[tokens - 1 - t, b, h] = s.T
    out = c.node(
        Op.GATED_DELTA_NET,
        F32,
        (n * heads, tokens * sequences + snapshots * n * sequences),
        (q, k, v, g, beta, state),
        (snapshots,),
    )
    total = out.n_bytes
    c.expect(c.view(out, (y.size,), (4, total, total, total)), y, "product")
    part = saved[: min(snapshots, tokens)]
    c.expect(c.view(out, (part.size,), (4, total, total, total), 4 * y.size), part, "product")


@op_case("gated-linear-attn", (1, 1), (4, 2))
def gated_linear_attn(c: CaseBuilder, tokens: int, sequences: int) -> None:
    n, heads, scale = 4, 3, 0.5
    k, v, q = (c.random(F32, n, heads, tokens * sequences) for _ in range(3))
    g = c.leaf(F32, c.rng.uniform(0.5, 1, (tokens * sequences, heads, n)))
    state = c.random(F32, n * n * heads, sequences)
    y, final = np.zeros((sequences, tokens, heads, n)), np.zeros((sequences, heads, n, n))
    for b, h in np.ndindex(sequences, heads):
        s = c.values(state).reshape(sequences, heads, n, n)[b, h].copy()  # [key, value]
        for t in range(tokens):
            at = b * tokens + t
            s = s * c.values(g)[0, at, h][:, None] + np.outer(c.values(k)[0, at, h], c.values(v)[0, at, h])
            y[b, t, h] = scale * c.values(q)[0, at, h] @ s
        final[b, h] = s
    out = c.node(
        Op.GATED_LINEAR_ATTN, F32, (n * heads, tokens * sequences + n * sequences), (k, v, q, g, state), (scale,)
    )
    c.expect(out, np.concatenate([y.reshape(-1), final.reshape(-1)]), "product")
