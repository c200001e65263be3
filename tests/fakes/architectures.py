"""A tiny random float32 model of any architecture, for tests that know what its logits must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.engine.ggml import GGMLType
from app.engine.gguf.layout import ValueType
from app.engine.gguf.writer import TensorData, Typed, write_gguf
from tests.fakes.gguf import tokenizer_metadata, vocabulary

N_EMBD, N_FF, N_HEADS, N_KV_HEADS, HEAD = 64, 96, 4, 2, 16
N_EXPERTS, N_USED, N_FF_EXPERT, N_FF_SHARED = 6, 2, 40, 56
KEY_HEADS, VALUE_HEADS, STATE, KERNEL = 2, 4, 16, 4


class Weights:
    """Tensors drawn one after the other from one generator; their order is part of the result."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.made: list[TensorData] = []

    def put(self, name: str, array: np.ndarray) -> None:
        """`array` in C order: the last axis is the tensor's first dimension."""
        self.made.append(TensorData(name, GGMLType.F32, array.shape[::-1], array.astype(np.float32)))

    def matrix(self, name: str, n_in: int, n_out: int, gain: float = 1.2, *batch: int) -> None:
        self.put(f"{name}.weight", self.rng.standard_normal((*batch, n_out, n_in)) * (gain / math.sqrt(n_in)))

    def vector(self, name: str, n: int, std: float = 0.3, mean: float = 0.0) -> None:
        self.put(name, mean + std * self.rng.standard_normal(n))

    def norm(self, name: str, n: int = N_EMBD) -> None:
        self.vector(f"{name}.weight", n, 0.2, 1.0)


def attention(w: Weights, b: str, *, qk_norm: bool = False, fused: bool = False, gated: bool = False) -> None:
    n_q = N_HEADS * HEAD * (2 if gated else 1)
    kv = N_KV_HEADS * HEAD
    if fused:
        w.matrix(f"{b}.attn_qkv", N_EMBD, n_q + 2 * kv, 1.5)
    else:
        w.matrix(f"{b}.attn_q", N_EMBD, n_q, 1.5)
        w.matrix(f"{b}.attn_k", N_EMBD, kv, 1.5)
        w.matrix(f"{b}.attn_v", N_EMBD, kv)
    if qk_norm:
        w.norm(f"{b}.attn_q_norm", HEAD)
        w.norm(f"{b}.attn_k_norm", HEAD)
    w.matrix(f"{b}.attn_output", N_HEADS * HEAD, N_EMBD, 2.0)


def dense(w: Weights, b: str) -> None:
    w.matrix(f"{b}.ffn_gate", N_EMBD, N_FF, 1.5)
    w.matrix(f"{b}.ffn_up", N_EMBD, N_FF)
    w.matrix(f"{b}.ffn_down", N_FF, N_EMBD)


def experts(w: Weights, b: str, n_ff: int = N_FF_EXPERT, *, merged: bool = False) -> None:
    w.matrix(f"{b}.ffn_gate_inp", N_EMBD, N_EXPERTS, 2.0)
    if merged:
        w.matrix(f"{b}.ffn_gate_up_exps", N_EMBD, 2 * n_ff, 1.4, N_EXPERTS)
    else:
        w.matrix(f"{b}.ffn_gate_exps", N_EMBD, n_ff, 1.5, N_EXPERTS)
        w.matrix(f"{b}.ffn_up_exps", N_EMBD, n_ff, 1.2, N_EXPERTS)
    w.matrix(f"{b}.ffn_down_exps", n_ff, N_EMBD, 1.4, N_EXPERTS)


def shared_expert(w: Weights, b: str, *, gated: bool) -> None:
    if gated:
        w.vector(f"{b}.ffn_gate_inp_shexp.weight", N_EMBD, 0.2)
    for name, n_in, n_out in (
        ("gate", N_EMBD, N_FF_SHARED),
        ("up", N_EMBD, N_FF_SHARED),
        ("down", N_FF_SHARED, N_EMBD),
    ):
        w.matrix(f"{b}.ffn_{name}_shexp", n_in, n_out)


def delta_net(w: Weights, b: str, *, legacy: bool) -> None:
    key, value = KEY_HEADS * STATE, VALUE_HEADS * STATE
    if legacy:
        w.matrix(f"{b}.ssm_in", N_EMBD, 2 * key + 2 * value)
    else:
        w.matrix(f"{b}.attn_qkv", N_EMBD, 2 * key + value)
        w.matrix(f"{b}.attn_gate", N_EMBD, value)
    w.put(f"{b}.ssm_conv1d.weight", 0.6 * w.rng.standard_normal((2 * key + value, KERNEL)))
    w.matrix(f"{b}.ssm_ba", N_EMBD, 2 * VALUE_HEADS)
    w.vector(f"{b}.ssm_dt.bias", VALUE_HEADS, 1.0)
    w.put(f"{b}.ssm_a", -np.exp(w.rng.uniform(math.log(0.005), math.log(2.0), VALUE_HEADS)))
    w.norm(f"{b}.ssm_norm", STATE)
    w.matrix(f"{b}.ssm_out", value, N_EMBD)


def llama_layer(w: Weights, b: str, i: int, **kinds: bool) -> None:
    del i
    w.norm(f"{b}.attn_norm")
    attention(w, b, **kinds)
    w.norm(f"{b}.ffn_norm")
    dense(w, b)


def expert_layer(w: Weights, b: str, n_ff: int, *, shared: bool = False) -> None:
    w.norm(f"{b}.attn_norm")
    attention(w, b)
    w.norm(f"{b}.ffn_norm")
    experts(w, b, n_ff)
    if shared:
        shared_expert(w, b, gated=False)


def phi_layer(w: Weights, b: str, i: int) -> None:
    del i
    w.norm(f"{b}.attn_norm")
    attention(w, b, fused=True)
    w.norm(f"{b}.ffn_norm")
    w.matrix(f"{b}.ffn_up", N_EMBD, 2 * N_FF, 1.4)
    w.matrix(f"{b}.ffn_down", N_FF, N_EMBD)


def next_layer(w: Weights, b: str, i: int) -> None:
    """The first layer projects as older files do."""
    w.norm(f"{b}.attn_norm")
    if (i + 1) % 2:
        delta_net(w, b, legacy=i == 0)
    else:
        attention(w, b, qk_norm=True, gated=True)
    w.norm(f"{b}.post_attention_norm")
    experts(w, b, merged=i > 1)
    shared_expert(w, b, gated=True)


def gemma_layer(w: Weights, b: str, i: int) -> None:
    llama_layer(w, b, i, qk_norm=True)
    w.norm(f"{b}.post_attention_norm")
    w.norm(f"{b}.post_ffw_norm")


EXPERT_KEYS = {"expert_count": N_EXPERTS, "expert_used_count": N_USED}
LONGROPE = {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.19}


@dataclass(frozen=True)
class Recipe:
    """An architecture, keys under its prefix, how a layer is drawn, and which rope factor tensors there are."""

    architecture: str
    layer: Callable[[Weights, str, int], None]
    keys: Mapping[str, Any] = field(default_factory=dict)
    n_layers: int = 2
    rope_factors: tuple[str, ...] = ()
    n_rot: int = HEAD
    tied: bool = False


def _fused(w: Weights, b: str, i: int) -> None:
    llama_layer(w, b, i, fused=True)


def _scaled(w: Weights, b: str, i: int) -> None:
    """Matrices whose products are multiplied by a number of their own, as 4-bit float formats have them."""
    llama_layer(w, b, i)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        w.vector(f"{b}.{name}.scale", 1, 0.2, 1.0)


def _scaled_experts(w: Weights, b: str, i: int) -> None:
    _mixtral(w, b, i)
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        w.vector(f"{b}.{name}.scale", N_EXPERTS, 0.2, 1.0)


def _mixtral(w: Weights, b: str, i: int) -> None:
    del i
    expert_layer(w, b, N_FF)


def _granite_experts(w: Weights, b: str, i: int) -> None:
    del i
    expert_layer(w, b, N_FF, shared=True)


_GRANITE = {
    "logit_scale": 0.5,
    "embedding_scale": 1.5,
    "residual_scale": 0.7,
    "attention.scale": 0.2,
}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
_BOTH = ("rope_factors_long", "rope_factors_short")

RECIPES: dict[str, Recipe] = {
    "llama-linear": Recipe("llama", llama_layer, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama-none": Recipe("llama", llama_layer, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "llama-old-linear": Recipe("llama", llama_layer, {"rope.scale_linear": 2.0}, tied=True),
    "llama-yarn": Recipe("llama", llama_layer, {**_YARN, "rope.scaling.attn_factor": 0.9}),
    "llama-longrope-long": Recipe(
        "llama", llama_layer, {**LONGROPE, "rope.scaling.original_context_length": 128}, rope_factors=_BOTH
    ),
    "llama-longrope-short": Recipe(
        "llama", llama_layer, {**LONGROPE, "rope.scaling.original_context_length": 1024}, rope_factors=_BOTH
    ),
    "llama-fused": Recipe("llama", _fused),
    "llama-scaled": Recipe("llama", _scaled),
    "mixtral-scaled": Recipe("llama", _scaled_experts, EXPERT_KEYS),
    "mixtral": Recipe("llama", _mixtral, EXPERT_KEYS),
    "mistral3": Recipe(
        "mistral3",
        llama_layer,
        {
            **_YARN,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 0.8,
            "attention.temperature_scale": 0.4,
        },
    ),
    "granite": Recipe("granite", llama_layer, _GRANITE, tied=True),
    "granite-unrotated": Recipe("granite", llama_layer, {**_GRANITE, "rope.scaling.finetuned": False}),
    "granitemoe": Recipe(
        "granitemoe",
        _granite_experts,
        {**_GRANITE, **EXPERT_KEYS, "expert_shared_feed_forward_length": N_FF_SHARED},
    ),
    "smollm3": Recipe("smollm3", llama_layer, n_layers=5),
    "phi3-long": Recipe(
        "phi3", phi_layer, {**LONGROPE, "rope.scaling.original_context_length": 128}, 2, _BOTH, n_rot=12
    ),
    "phi3-short": Recipe("phi3", phi_layer, {"rope.scaling.original_context_length": 1024}, 2, _BOTH),
    "phi3-plain": Recipe("phi3", phi_layer, {"attention.sliding_window": 8}),
    "gemma3-softcap": Recipe(
        "gemma3",
        gemma_layer,
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 2,
            "final_logit_softcapping": 5.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        n_layers=3,
        tied=True,
    ),
    "qwen3next": Recipe(
        "qwen3next",
        next_layer,
        {
            **EXPERT_KEYS,
            "expert_feed_forward_length": N_FF_EXPERT,
            "expert_shared_feed_forward_length": N_FF_SHARED,
            "full_attention_interval": 2,
            "ssm.conv_kernel": KERNEL,
            "ssm.state_size": STATE,
            "ssm.group_count": KEY_HEADS,
            "ssm.time_step_rank": VALUE_HEADS,
            "ssm.inner_size": VALUE_HEADS * STATE,
        },
        n_layers=4,
        n_rot=8,
    ),
}


def write_model(path: Path, name: str, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write the model of a recipe, minus some tensors; `changes` replace metadata, None removes it."""
    recipe = RECIPES[name]
    return write_gguf(path, metadata(recipe, changes), [t for t in tensors(recipe, name) if t.name not in without])


def metadata(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "context_length": 2048,
        "embedding_length": N_EMBD,
        "block_count": recipe.n_layers,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": recipe.n_rot,
        "vocab_size": len(vocabulary()),
        **recipe.keys,
    }
    general = {
        "general.architecture": recipe.architecture,
        "general.file_type": 0,
        "general.quantization_version": 2,
        **{f"{recipe.architecture}.{key}": value for key, value in own.items()},
        **tokenizer_metadata(),
        "tokenizer.ggml.padding_token_id": Typed(ValueType.UINT32, 0),
    }
    return {key: value for key, value in {**general, **changes}.items() if value is not None}


def tensors(recipe: Recipe, name: str) -> list[TensorData]:
    w = Weights(1000 + sorted(RECIPES).index(name))
    n_vocab = len(vocabulary())
    w.put("token_embd.weight", w.rng.standard_normal((n_vocab, N_EMBD)) * (0.4 if recipe.tied else 1.0))
    w.norm("output_norm")
    if not recipe.tied:
        w.matrix("output", N_EMBD, n_vocab, 3.0)
    for factors in recipe.rope_factors:
        w.put(f"{factors}.weight", np.exp(w.rng.uniform(0, 2, recipe.n_rot // 2)))
    for i in range(recipe.n_layers):
        recipe.layer(w, f"blk.{i}", i)
    return w.made
