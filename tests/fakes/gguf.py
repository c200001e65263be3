"""Small model files with random weights: sound in every way, and meaning nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import TRAITS, GGMLType, row_bytes
from app.engine.gguf.layout import ValueType
from app.engine.gguf.quants import ENCODERS, dequantize, quantize
from app.engine.gguf.writer import TensorData, Typed, write_gguf

CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "i n", "Ġt he", "a n", "o n")
_NORMAL, _CONTROL = 1, 3

#: Byte offsets of the float16 scales of types that nothing here can quantize to.
_SCALES: dict[GGMLType, tuple[int, ...]] = {
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_XS: (0,),
    GGMLType.IQ2_XXS: (0,),
    GGMLType.IQ2_XS: (0,),
    GGMLType.IQ2_S: (0,),
    GGMLType.IQ3_XXS: (0,),
    GGMLType.IQ3_S: (0,),
    GGMLType.IQ1_S: (0,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
    GGMLType.Q1_0: (0,),
    GGMLType.Q2_0: (0,),
}


def random_rows(type_: GGMLType, n_rows: int, n: int, rng: np.random.Generator, std: float = 1.0) -> NDArray[np.uint8]:
    """Packed rows [n_rows, row_bytes] of any type whose values have about the standard deviation `std`."""
    if type_ in ENCODERS:
        return quantize(type_, (rng.standard_normal((n_rows, n)) * std).astype(np.float32))
    raw = rng.integers(0, 256, (n_rows, row_bytes(type_, n)), dtype=np.uint8)
    blocks = raw.reshape(-1, TRAITS[type_].block_bytes)
    _set_scales(type_, blocks, 1.0)
    _set_scales(type_, blocks, std / float(dequantize(type_, raw[: min(8, n_rows)]).std()))
    return raw


def _set_scales(type_: GGMLType, blocks: NDArray[np.uint8], value: float) -> None:
    half = np.array([value], "<f2")
    if type_ is GGMLType.MXFP4:  # a power of two
        blocks[:, 0] = 127 + round(math.log2(value))
    elif type_ is GGMLType.NVFP4:  # four of them: exponent in bits 3 to 6, bias 7
        blocks[:, :4] = min(max(7 + round(math.log2(value)), 1), 14) << 3
    elif type_ is GGMLType.IQ1_M:  # its four digits are the top four bits of four words
        for word in range(4):
            digit = int(half.view("<u2")[0]) >> 4 * word & 15
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | digit << 4
    else:
        for offset in _SCALES[type_]:
            blocks[:, offset : offset + 2] = half.view(np.uint8)


@dataclass(frozen=True)
class TinyLlama:
    """Sizes of a tiny llama. Its tokenizer is byte-level BPE with three special tokens and a ChatML template.

    `type` is that of all matrices; for types with blocks of 256 the sizes must be multiples of 256, as
    `TinyLlama.of_type` makes them. `extra` metadata is added to, or replaces, what is written.
    """

    type: GGMLType = GGMLType.F32
    n_layers: int = 2
    n_embd: int = 64
    n_ff: int = 128
    n_heads: int = 4
    n_kv_heads: int = 2
    n_ctx: int = 2048
    tied: bool = False
    seed: int = 1
    logit_std: float = 3.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_type(cls, type_: GGMLType, **sizes: Any) -> TinyLlama:
        if TRAITS[type_].block_elements > 32:
            sizes = {"n_embd": 256, "n_ff": 256, **sizes}
        return cls(type_, **sizes)

    @property
    def n_vocab(self) -> int:
        return len(vocabulary())

    def metadata(self) -> dict[str, Any]:
        head = self.n_embd // self.n_heads
        return {
            "general.architecture": "llama",
            "general.name": "tiny llama",
            "general.file_type": 0,
            "llama.context_length": self.n_ctx,
            "llama.embedding_length": self.n_embd,
            "llama.block_count": self.n_layers,
            "llama.feed_forward_length": self.n_ff,
            "llama.attention.head_count": self.n_heads,
            "llama.attention.head_count_kv": self.n_kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": head,
            "llama.rope.freq_base": 10000.0,
            "llama.vocab_size": self.n_vocab,
            **tokenizer_metadata(),
            **self.extra,
        }

    def tensors(self) -> list[TensorData]:
        rng = np.random.default_rng(self.seed)
        kv = self.n_embd // self.n_heads * self.n_kv_heads

        def matrix(name: str, n_in: int, n_out: int, gain: float) -> TensorData:
            rows = random_rows(self.type, n_out, n_in, rng, gain / math.sqrt(n_in))
            return TensorData(f"{name}.weight", self.type, (n_in, n_out), rows)

        def norm(name: str, signed: bool = False) -> TensorData:
            w = 1 + 0.2 * rng.standard_normal(self.n_embd)
            w *= rng.choice([-1.0, 1.0], self.n_embd) if signed else 1.0
            return TensorData(f"{name}.weight", GGMLType.F32, (self.n_embd,), w.astype(np.float32))

        gain = self.logit_std if self.tied else math.sqrt(self.n_embd)
        made = [matrix("token_embd", self.n_embd, self.n_vocab, gain), norm("output_norm", signed=self.tied)]
        if not self.tied:
            made.append(matrix("output", self.n_embd, self.n_vocab, self.logit_std))
        for i in range(self.n_layers):
            b = f"blk.{i}"
            made += [
                norm(f"{b}.attn_norm"),
                matrix(f"{b}.attn_q", self.n_embd, self.n_embd, 1.25),
                matrix(f"{b}.attn_k", self.n_embd, kv, 1.25),
                matrix(f"{b}.attn_v", self.n_embd, kv, 1.2),
                matrix(f"{b}.attn_output", self.n_embd, self.n_embd, 2.0),
                norm(f"{b}.ffn_norm"),
                matrix(f"{b}.ffn_gate", self.n_embd, self.n_ff, 1.5),
                matrix(f"{b}.ffn_up", self.n_embd, self.n_ff, 1.2),
                matrix(f"{b}.ffn_down", self.n_ff, self.n_embd, 1.0),
            ]
        return made


def write_tiny_llama(path: Path, model: TinyLlama | None = None) -> Path:
    """Write a tiny model; the same bytes for the same sizes and seed."""
    model = model or TinyLlama()
    return write_gguf(path, model.metadata(), model.tensors())


def byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level vocabularies: itself where printable, else moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = {b: 0x100 + i for i, b in enumerate(b for b in range(256) if b not in printable)}
    return [chr(moved.get(b, b)) for b in range(256)]


def vocabulary() -> list[str]:
    """All bytes in order, the merged pieces, the special tokens."""
    return byte_alphabet() + [merge.replace(" ", "") for merge in MERGES] + list(SPECIALS)


def tokenizer_metadata(n_vocab: int = 0) -> dict[str, Any]:
    """The small vocabulary; up to `n_vocab` tokens, pieces of no meaning follow."""
    tokens = vocabulary()
    tokens += [f"token{number}" for number in range(len(tokens), n_vocab)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(ValueType.INT32, [_CONTROL if t in SPECIALS else _NORMAL for t in tokens]),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": tokens.index(SPECIALS[0]),
        "tokenizer.ggml.eos_token_id": tokens.index(SPECIALS[2]),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
