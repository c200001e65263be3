"""RoPE and its scalings, from a file's keys to the parameters of the op."""

from __future__ import annotations

import math

from app.engine.ggml import RopeMode
from app.engine.models.hparams import MAX_CONTEXT_TOKENS, Keys
from app.engine.rope import RopeParams
from app.errors import UnsupportedModel

_MAX_PAIRS = 1 << 16
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
    factor = _scaling_factor(keys)
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
        n_ctx_orig=original_context(keys),
        freq_base=freq_base if freq_base is not None else read_freq_base(keys, "rope.freq_base"),
        freq_scale=1.0 / factor,
        ext_factor=1.0 if is_yarn else 0.0,
        attn_factor=attn_factor,
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0) if own_betas else 32.0,
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0) if own_betas else 1.0,
    )


def read_freq_base(keys: Keys, name: str) -> float:
    """The base of the frequencies; with 1 or less they would not fall from pair to pair."""
    base = keys.number(name, 10000.0)
    if base <= 1:
        raise keys.wrong(name, base, "more than 1")
    return base


def read_sections(keys: Keys) -> tuple[int, int, int, int]:
    """How many pairs of channels each of the four runs of positions rotates."""
    name = "rope.dimension_sections"
    a, b, c, d = sections = keys.per_block(name, 4)
    if min(sections) < 0 or not 0 < sum(sections) <= _MAX_PAIRS:
        raise keys.wrong(name, list(sections), f"four counts of pairs of channels, 1 to {_MAX_PAIRS} together")
    return a, b, c, d


def original_context(keys: Keys) -> int:
    """The context a scaling starts from, in tokens; the model's own where the file names none."""
    name = "rope.scaling.original_context_length"
    n_tokens = keys.integer(name, 0) or keys.integer("context_length")
    if not 0 < n_tokens <= MAX_CONTEXT_TOKENS:
        raise keys.wrong(name, n_tokens, f"1 to {MAX_CONTEXT_TOKENS} tokens")
    return n_tokens


def _scaling_factor(keys: Keys) -> float:
    """How many times longer the context becomes; 0, like no entry at all, means once."""
    name = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.number(name, 0.0)
    if factor < 0:
        raise keys.wrong(name, factor, "more than 0")
    return factor or 1.0


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
    name = f"rope_factors_{'long' if n_ctx > original_context(keys) else 'short'}.weight"
    return name if name in keys.gguf.tensors else None
