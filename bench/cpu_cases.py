"""What bench.cpu measures: models, contexts, targets, and how much work they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app import models_store
from app.engine.gguf.reader import GGUFFile
from app.settings import model_cache_dir
from bench import make_model

PROMPT_TOKENS, DECODE_TOKENS = 512, 64
_HALF_FLOAT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Target:
    """Floors. Decode passes with the lesser of a ratio to llama.cpp and a share of the measured read limit."""

    prompt_ratio: float | None
    decode_ratio: float
    read_share: dict[int, float]  # by threads; empty: the ratio alone


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the context before which it decodes."""

    label: str
    path: Callable[[], Path]
    target: Target
    depth: int = 0

    @property
    def n_ctx(self) -> int:
        return 2048 if self.depth == 0 else self.depth + 512


def _known(name: str) -> Callable[[], Path]:
    return lambda: models_store.resolve(name)


def _random(shape: str, mixture: str) -> Callable[[], Path]:
    """A file of random weights in the cache, made when it is first asked for."""

    def path() -> Path:
        file = model_cache_dir().parent / "bench" / f"{shape}-{mixture}.gguf"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".part")
            print(f"making {file}", flush=True)
            make_model.make(shape, mixture, str(unfinished))
            unfinished.rename(file)
        return file

    return path


_K_M = Target(2.0, 1.3, {1: 0.85, 2: 0.75})
_PLAIN = Target(1.5, 1.15, {1: 0.90, 2: 0.80})
CASES = {
    "smollm2": Case("SmolLM2 135M Q4_1", _known("smollm2"), Target(4.0, 1.7, {1: 0.75, 2: 0.65})),
    "gemma": Case("Gemma 3 270M Q4_K_M", _known("gemma3-270m"), Target(2.0, 1.3, {1: 0.80, 2: 0.70})),
    "1b-q4_k_m": Case("1B Q4_K_M", _random("llama-1b", "Q4_K_M"), _K_M),
    "1.7b-q4_k_m": Case("1.7B Q4_K_M", _random("qwen3-1.7b", "Q4_K_M"), _K_M),
    "1b-q8_0": Case("1B Q8_0", _random("llama-1b", "Q8_0"), _PLAIN),
    "1b-q4_0": Case("1B Q4_0", _random("llama-1b", "Q4_0"), _PLAIN),
    "1b-8k": Case("1B Q4_K_M after 8k", _random("llama-1b", "Q4_K_M"), Target(None, 1.5, {}), depth=8192),
}


@dataclass(frozen=True, slots=True)
class Work:
    """Per token: products of a prompt's matrices, and the bytes that decode reads (weights, then keys and values)."""

    prompt_macs: float
    decode_bytes: int


def work_of(path: Path, depth: int) -> Work:
    """Of a dense attention model; a prompt's output matrix is multiplied by its last token alone."""
    gguf = GGUFFile.open(str(path))
    layers = [t for t in gguf.tensors.values() if t.n_dims == 2 and t.name.startswith("blk.")]
    head = gguf.tensors.get("output.weight") or gguf.tensors["token_embd.weight"]
    macs = sum(t.ne[0] * t.ne[1] for t in layers) + head.ne[0] * head.ne[1] / PROMPT_TOKENS
    n_bytes = sum(t.n_bytes for t in layers) + head.n_bytes
    if depth:
        a = gguf.metadata["general.architecture"]
        head_elements = gguf.metadata[f"{a}.attention.key_length"] + gguf.metadata[f"{a}.attention.value_length"]
        n_heads = gguf.metadata[f"{a}.attention.head_count_kv"] * gguf.metadata[f"{a}.block_count"]
        n_bytes += depth * n_heads * head_elements * _HALF_FLOAT_BYTES
    return Work(macs, n_bytes)
