"""Model files with random weights in the shapes of real models: `python -m bench.make_model SHAPE TYPE OUT.gguf`.

The speed of kernels does not depend on the values, so these stand in for files of gigabytes. Layers are all alike and
the mixture of types is that of llama.cpp's "M" files. There is no vocabulary: these files are for benchmarks alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import GGMLType, row_bytes
from app.engine.gguf.layout import ValueType
from app.engine.gguf.quants import quantize
from app.engine.gguf.writer import TensorData, Typed, write_gguf


@dataclass(frozen=True, slots=True)
class Shape:
    """The hyperparameters that decide how much there is to compute."""

    architecture: str
    n_embd: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int

    @property
    def has_head_norms(self) -> bool:
        return self.architecture == "qwen3"


SHAPES = {
    "llama-1b": Shape("llama", 2048, 16, 32, 8, 64, 8192, 128256),  # Llama 3.2 1B
    "qwen3-1.7b": Shape("qwen3", 2048, 28, 16, 8, 128, 6144, 151936),  # Qwen3 1.7B
}
TYPES = ("Q4_K_M", "Q8_0", "Q4_0")
#: Where the half floats of a block stand, and how far they should be from what random bits would make of them.
_SCALES = {
    GGMLType.Q4_0: ((0, 0.005),),
    GGMLType.Q8_0: ((0, 0.0003),),
    GGMLType.Q4_K: ((0, 0.0002), (2, 0.001)),
    GGMLType.Q6_K: ((208, 0.00001),),
}


def random_rows(rng: np.random.Generator, type_: GGMLType, n_rows: int, n: int) -> NDArray[np.uint8]:
    """Packed rows with random quants and small scales."""
    if type_ not in _SCALES:
        return quantize(type_, rng.standard_normal((n_rows, n), np.float32) * np.float32(0.02))
    long_blocks = n % 256 == 0 and type_ in (GGMLType.Q4_K, GGMLType.Q6_K)
    block_bytes = row_bytes(type_, 256 if long_blocks else 32)
    raw = rng.integers(0, 256, (n_rows * row_bytes(type_, n) // block_bytes, block_bytes), np.uint8)
    for offset, scale in _SCALES[type_]:
        halves = np.full((len(raw), 1), scale, np.float16)
        raw[:, offset : offset + 2] = halves.view(np.uint8)
    return raw.reshape(n_rows, -1)


def type_of(mixture: str, name: str, layer: int, n_layers: int) -> GGMLType:
    """What llama.cpp's mixtures store a matrix as."""
    if mixture != "Q4_K_M":
        return GGMLType[mixture]
    more_bits = layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2
    if name == "token_embd" or (name in ("attn_v", "ffn_down") and more_bits):
        return GGMLType.Q6_K
    return GGMLType.Q4_K


def tensors(shape: Shape, mixture: str, seed: int) -> Iterator[TensorData]:
    rng = np.random.default_rng(seed)
    d, q, kv = shape.n_embd, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim

    def matrix(name: str, layer: int, n_in: int, n_out: int) -> TensorData:
        type_ = type_of(mixture, name, layer, shape.n_layers)
        full = f"{name}.weight" if layer < 0 else f"blk.{layer}.{name}.weight"
        return TensorData(full, type_, (n_in, n_out), random_rows(rng, type_, n_out, n_in))

    def norm(name: str, layer: int, n: int) -> TensorData:
        full = f"{name}.weight" if layer < 0 else f"blk.{layer}.{name}.weight"
        return TensorData(full, GGMLType.F32, (n,), np.ones(n, np.float32))

    yield matrix("token_embd", -1, d, shape.n_vocab)
    yield norm("output_norm", -1, d)
    for layer in range(shape.n_layers):
        yield norm("attn_norm", layer, d)
        yield matrix("attn_q", layer, d, q)
        yield matrix("attn_k", layer, d, kv)
        yield matrix("attn_v", layer, d, kv)
        yield matrix("attn_output", layer, q, d)
        if shape.has_head_norms:
            yield norm("attn_q_norm", layer, shape.head_dim)
            yield norm("attn_k_norm", layer, shape.head_dim)
        yield norm("ffn_norm", layer, d)
        yield matrix("ffn_gate", layer, d, shape.n_ff)
        yield matrix("ffn_up", layer, d, shape.n_ff)
        yield matrix("ffn_down", layer, shape.n_ff, d)


def metadata(shape: Shape) -> dict[str, object]:
    a = shape.architecture
    return {
        "general.architecture": a,
        "general.name": "random weights",
        f"{a}.block_count": shape.n_layers,
        f"{a}.context_length": 32768,
        f"{a}.embedding_length": shape.n_embd,
        f"{a}.feed_forward_length": shape.n_ff,
        f"{a}.attention.head_count": shape.n_heads,
        f"{a}.attention.head_count_kv": shape.n_kv_heads,
        f"{a}.attention.key_length": shape.head_dim,
        f"{a}.attention.value_length": shape.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.dimension_count": shape.head_dim,
        f"{a}.rope.freq_base": 500000.0,
        f"{a}.vocab_size": Typed(ValueType.UINT32, shape.n_vocab),
        "tokenizer.ggml.model": "no_vocab",
    }


def make(shape_name: str, mixture: str, out: str, seed: int = 0) -> None:
    """Write the file. The same arguments give the same bytes."""
    shape = SHAPES[shape_name]
    write_gguf(out, metadata(shape), list(tensors(shape, mixture, seed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("out")
    arguments = parser.parse_args()
    make(arguments.shape, arguments.type, arguments.out)


if __name__ == "__main__":
    main()
