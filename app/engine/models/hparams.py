"""Hyperparameters that most architectures share, read once from a file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from app.engine.gguf.reader import GGUFFile
from app.errors import FormatError, UnsupportedModel

T = TypeVar("T")

MAX_BLOCKS = 512
MAX_EXPERTS = 1024
_MAX_SIZE = 1e15
#: Positions are 32-bit integers.
MAX_CONTEXT_TOKENS = (1 << 31) - 1


class Keys:
    """The metadata under one architecture's prefix."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.architecture = gguf.text("general.architecture")

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self._key(name) in self.gguf.metadata

    def integer(self, name: str, default: int | None = None) -> int:
        return self.gguf.integer(self._key(name), *_given(default))

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number, of a size that 32-bit floats still hold when it is squared or divided by."""
        value = self.gguf.number(self._key(name), *_given(default))
        if not math.isfinite(value):
            raise self.wrong(name, value, "a finite number")
        if value and not 1 / _MAX_SIZE <= abs(value) <= _MAX_SIZE:
            raise self.wrong(name, value, f"0 or {1 / _MAX_SIZE:g} to {_MAX_SIZE:g}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.wrong(name, value, "more than 0")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self.gguf.flag(self._key(name), *_given(default))

    def text(self, name: str, default: str | None = None) -> str:
        return self.gguf.text(self._key(name), *_given(default))

    def per_block(self, name: str, n_blocks: int, default: int | None = None) -> tuple[int, ...]:
        """One number for all blocks, or an array with one per block."""
        return self.gguf.integers(self._key(name), n_blocks, *_given(default))

    def uniform(self, name: str, default: int | None = None) -> int:
        """An integer that may also be written once per block, but must be the same in all of them."""
        value = self.gguf.metadata.get(self._key(name))
        if not isinstance(value, list):
            return self.integer(name, default)
        if not value:
            raise self.wrong(name, value, "a number, or one per block")
        if len(set(value)) != 1 or not isinstance(value[0], int):
            raise UnsupportedModel(
                f"{self.gguf.path}: {self._key(name)} differs between blocks, which is not supported"
            )
        return value[0]

    def wrong(self, name: str, value: object, expected: str) -> FormatError:
        """For a key whose value is of the right type, but makes no sense."""
        return self.error(f"{self._key(name)} is {value}, expected {expected}; the file is corrupt or badly converted")

    def error(self, message: str) -> FormatError:
        return FormatError(f"{self.gguf.path}: {message}")


def _given(default: T | None) -> tuple[T, ...]:
    return () if default is None else (default,)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts feed-forward part. `n_ff` 0: as the architecture derives it."""

    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Sizes of a decoder. Tuples have one entry per block, next-token-prediction blocks included."""

    architecture: str
    name: str
    n_blocks: int
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_ff: tuple[int, ...]
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    n_rot: int
    eps: float
    experts: Experts | None

    @property
    def attn_scale(self) -> float:
        return 1.0 / math.sqrt(self.key_length)


def read_hyperparameters(keys: Keys) -> Hyperparameters:
    """Raises FormatError where a key is missing or makes no sense, UnsupportedModel where it asks for too much."""
    n_blocks = keys.integer("block_count")
    n_extra = keys.integer("nextn_predict_layers", 0)
    n_embd = keys.integer("embedding_length")
    if not 0 <= n_extra < n_blocks <= MAX_BLOCKS:  # before anything is made once per block
        raise keys.error(f"{n_blocks} blocks (at most {MAX_BLOCKS}), {n_extra} of them for prediction, make no model")
    n_heads = keys.per_block("attention.head_count", n_blocks)
    if n_embd <= 0 or not any(n_heads):
        raise keys.error(f"{n_embd} channels and {max(n_heads, default=0)} heads make no model")
    default_length = n_embd // max(n_heads)
    key_length = keys.integer("attention.key_length", default_length)
    value_length = keys.integer("attention.value_length", default_length)
    n_rot = keys.integer("rope.dimension_count", key_length)
    if min(key_length, value_length) <= 0 or not 0 <= n_rot <= key_length or n_rot % 2:
        raise keys.error(
            f"heads of {key_length} and {value_length} channels, {n_rot} of which are rotated, make no model"
        )
    n_ctx_train = keys.integer("context_length")
    if not 0 < n_ctx_train <= MAX_CONTEXT_TOKENS:
        raise keys.error(f"a context of {n_ctx_train} tokens makes no model (1 to {MAX_CONTEXT_TOKENS})")
    return Hyperparameters(
        architecture=keys.architecture,
        name=keys.gguf.text("general.name", keys.architecture),
        n_blocks=n_blocks,
        n_layers=n_blocks - n_extra,
        n_embd=n_embd,
        n_vocab=_vocabulary(keys),
        n_ctx_train=n_ctx_train,
        n_ff=keys.per_block("feed_forward_length", n_blocks, 0),
        n_heads=n_heads,
        n_kv_heads=_kv_heads(keys, n_blocks, n_heads),
        key_length=key_length,
        value_length=value_length,
        n_rot=n_rot,
        eps=_epsilon(keys),
        experts=_experts(keys),
    )


def _epsilon(keys: Keys) -> float:
    name = "attention.layer_norm_rms_epsilon"
    eps = keys.number(name)
    if not 0 <= eps < 1:
        raise keys.wrong(name, eps, "a small positive number")
    return eps


def _kv_heads(keys: Keys, n_blocks: int, n_heads: tuple[int, ...]) -> tuple[int, ...]:
    if not keys.has("attention.head_count_kv"):
        return n_heads
    n_kv_heads = keys.per_block("attention.head_count_kv", n_blocks)
    for block, (n, n_kv) in enumerate(zip(n_heads, n_kv_heads, strict=True)):
        if n_kv <= 0 or n % n_kv:
            raise keys.error(f"block {block} has {n} heads, which {n_kv} key-value heads cannot share")
    return n_kv_heads


def _vocabulary(keys: Keys) -> int:
    metadata: Mapping[str, object] = keys.gguf.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        return len(tokens)
    return keys.integer("vocab_size")


def _experts(keys: Keys) -> Experts | None:
    n_experts = keys.integer("expert_count", 0)
    if n_experts == 0:
        return None
    n_used = keys.uniform("expert_used_count")
    if not 0 < n_used <= n_experts <= MAX_EXPERTS:
        raise keys.error(f"{n_used} of {n_experts} experts cannot be used (at most {MAX_EXPERTS})")
    if keys.integer("expert_group_count", 0) > 1:
        raise UnsupportedModel(f"{keys.gguf.path}: experts routed by groups are not supported for {keys.architecture}")
    return Experts(
        n_experts=n_experts,
        n_used=n_used,
        n_ff=keys.uniform("expert_feed_forward_length", 0),
        n_ff_shared=keys.integer("expert_shared_feed_forward_length", 0),
    )
