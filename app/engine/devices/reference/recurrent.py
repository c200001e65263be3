"""Convolution over time, state-space scan and linear attention: one token after the other, all heads at once."""

from __future__ import annotations

import math

import numpy as np

from app.engine.devices.reference.activations import softplus
from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats
from app.engine.devices.reference.rows import checked_ids
from app.engine.ggml import Op


def _ssm_conv(n: Node) -> Step:
    """y[c, t, b] = sum over k of x[t + k, c, b] * kernel[k, c]."""
    x, kernel, out = n.src(0).array[0], n.src(1).array[0, 0], n.out.array[0]
    width = kernel.shape[1]
    windows = np.lib.stride_tricks.sliding_window_view(x, width, axis=2)  # [b, c, t, k]
    return lambda: np.copyto(out, np.einsum("bctk,ck->btc", windows, kernel))


def _ssm_scan(n: Node) -> Step:
    """S = S * exp(d A) + d x B; y = S C, with d = softplus(dt). Behind y stand snapshots of S, the last one first."""
    state, ids = n.src(0).array, n.src(6)
    x, dt, b, c = n.src(1).array, n.src(2).array[0], n.src(4).array, n.src(5).array
    a = n.src(3).array[0, 0]  # [heads, 1 or d_state]
    head_dim, heads, tokens, sequences = n.src(1).ne
    d_state, groups = n.src(4).ne[0], n.src(4).ne[1]
    snapshots = max(1, n.param(0))
    flat: Floats = n.out.array.reshape(-1)
    n_outputs = head_dim * heads * tokens * sequences
    y = flat[:n_outputs].reshape(sequences, tokens, heads, head_dim)
    saved = flat[n_outputs:].reshape(snapshots, sequences, heads, head_dim, d_state)

    def step() -> None:
        s = state[checked_ids(n, ids, n.src(0).ne[3])[0, 0, 0]]  # a copy: [sequences, heads, head_dim, d_state]
        for t in range(tokens):
            d = softplus(dt[:, t])  # [sequences, heads]
            decay = np.exp(d[:, :, None, None] * a[None, :, None, :])
            inputs = (x[:, t] * d[:, :, None])[..., None]
            s = s * decay + inputs * np.repeat(b[:, t], heads // groups, axis=1)[:, :, None, :]
            np.einsum("bhrs,bhs->bhr", s, np.repeat(c[:, t], heads // groups, axis=1), out=y[:, t])
            if tokens - 1 - t < snapshots:
                np.copyto(saved[tokens - 1 - t], s)

    return step


def _gated_delta_net(n: Node) -> Step:
    """The gated delta rule: decay the state, correct what it says about k towards v by beta, ask it with q."""
    q, k, v, g, beta = (n.src(i).array for i in range(5))
    size, heads, tokens, sequences = n.src(2).ne
    head_of, sequence_of = np.arange(heads) % n.src(0).ne[1], np.arange(sequences) // (sequences // n.src(0).ne[3])
    state = n.src(5).array.reshape(sequences, heads, size, size)  # [.., value, key]
    snapshots = n.param(0)
    flat: Floats = n.out.array.reshape(-1)
    n_outputs = size * heads * tokens * sequences
    y = flat[:n_outputs].reshape(sequences, tokens, heads, size)
    saved = flat[n_outputs:].reshape(snapshots, sequences, heads, size, size)
    scale = np.float32(1 / math.sqrt(size))

    def step() -> None:
        s: Floats = state.copy()
        keys = k[sequence_of][:, :, head_of]  # [sequences, tokens, heads, size]
        queries = q[sequence_of][:, :, head_of]
        for t in range(tokens):
            s *= np.exp(g[:, t])[:, :, None, :]
            known = np.matmul(s, keys[:, t, :, :, None])[..., 0]
            change = beta[:, t] * (v[:, t] - known)
            s += change[..., :, None] * keys[:, t, :, None, :]
            y[:, t] = np.matmul(s, queries[:, t, :, :, None])[..., 0] * scale
            if tokens - 1 - t < snapshots:
                np.copyto(saved[tokens - 1 - t], s)

    return step


def _gated_linear_attn(n: Node) -> Step:
    """S = S * g + k v; y = scale * q S, with S [key, value] rows."""
    size, heads, n_tokens, _ = n.src(0).ne
    sequences = n.src(4).tensor.n_elements // (size * size * heads)
    tokens = n_tokens // sequences
    k, v, q, g = (n.src(i).array.reshape(sequences, tokens, heads, size) for i in range(4))
    state = n.src(4).array.reshape(sequences, heads, size, size)
    scale = np.float32(n.param_f32(0))
    flat: Floats = n.out.array.reshape(-1)
    n_outputs = size * heads * n_tokens
    y = flat[:n_outputs].reshape(sequences, tokens, heads, size)
    final = flat[n_outputs:].reshape(sequences, heads, size, size)

    def step() -> None:
        s: Floats = state.copy()
        for t in range(tokens):
            s *= g[:, t, :, :, None]
            s += k[:, t, :, :, None] * v[:, t, :, None, :]
            y[:, t] = np.matmul(q[:, t, :, None, :], s)[..., 0, :] * scale
        np.copyto(final, s)

    return step


BINDERS: dict[Op, Binder] = {
    Op.SSM_CONV: _ssm_conv,
    Op.SSM_SCAN: _ssm_scan,
    Op.GATED_DELTA_NET: _gated_delta_net,
    Op.GATED_LINEAR_ATTN: _gated_linear_attn,
}
