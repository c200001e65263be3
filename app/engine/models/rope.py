"""RoPE and its scalings, from a file's keys to the parameters of the op."""

from __future__ import annotations

import math

from app.engine.ggml import RopeMode
from app.engine.models.hparams import Keys
from app.engine.rope import RopeParams
from app.errors import UnsupportedModel

SCALINGS = ("none", "linear", "yarn", "longrope")


def read_rope(
    keys: Keys,
    mode: RopeMode,
    n_dims: int,
    *,
    freq_base: float | None = None,
    scaled: bool = True,
    own_betas: bool = False,
) -> RopeParams:
    """Parameters of ROPE. `freq_base` overrides the file's; without `scaled` its scaling is left out.

    `own_betas`: the architecture reads the YaRN betas and the log multiplier from the file.
    """
    scaling = scaling_type(keys)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    attn_factor = keys.number("rope.scaling.attn_factor", 1.0)
    if scaling == "none" or not scaled:
        factor = 1.0
    is_yarn = scaling == "yarn" and scaled
    if is_yarn and own_betas:
        # The op multiplies by 1 + 0.1 ln f; a log multiplier m wants (1 + 0.1 ln f) / (1 + 0.1 m ln f).
        multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        attn_factor /= 1.0 + 0.1 * multiplier * math.log(max(factor, 1.0))
    return RopeParams(
        n_dims=n_dims,
        mode=mode,
        n_ctx_orig=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        freq_base=freq_base if freq_base is not None else keys.number("rope.freq_base", 10000.0),
        freq_scale=1.0 / factor,
        ext_factor=1.0 if is_yarn else 0.0,
        attn_factor=attn_factor,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0) if own_betas else 32.0,
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0) if own_betas else 1.0,
    )


def scaling_type(keys: Keys) -> str:
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in SCALINGS:
        raise UnsupportedModel(
            f"{keys.gguf.path}: rope scaling {scaling!r} is not supported; known are {', '.join(SCALINGS)}"
        )
    return scaling


def factor_tensor(keys: Keys, n_ctx: int) -> str | None:
    """The tensor of frequency factors this model has: one for all contexts, or for longrope one of two."""
    if scaling_type(keys) == "longrope":
        return factor_tensor_by_context(keys, n_ctx)
    return "rope_freqs.weight" if "rope_freqs.weight" in keys.gguf.tensors else None


def factor_tensor_by_context(keys: Keys, n_ctx: int) -> str | None:
    """The long factors when a sequence may be longer than the original context, else the short ones."""
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    name = f"rope_factors_{'long' if n_ctx > original else 'short'}.weight"
    return name if name in keys.gguf.tensors else None
