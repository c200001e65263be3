"""Makes `data/perplexity.json`: how well llama.cpp's SmolLM2 predicts `data/documents.txt`.

    python -m tests.engine.make_perplexity MODEL.gguf

Needs the package llama-cpp-python (made with 0.3.36). "exact" widens the weights to float32 and keeps a float32 cache:
the only rounding is that of float32. "as it is" takes the file as it is, with a float16 cache and activations rounded
to 8 bits. No flash attention, one thread.

The text is public domain: the Declaration of Independence (1776), the Gettysburg Address (1863), and six amendments to
the constitution of the United States (1791). It is read in windows that each start from nothing; every token of a
window but its first is scored.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from app.engine.ggml import GGMLType, row_bytes
from app.engine.gguf.layout import ValueType
from app.engine.gguf.quants import dequantize
from app.engine.gguf.reader import GGUFFile
from app.engine.gguf.writer import TensorData, Typed, write_gguf
from app.engine.text.tokenizer import Tokenizer

DATA = Path(__file__).with_name("data")
TEXT = DATA / "documents.txt"
FIGURES = DATA / "perplexity.json"
WINDOW_TOKENS = 512


def windows(tokenizer: Tokenizer) -> list[list[int]]:
    """The text's tokens, window by window."""
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special=True, parse_special=False)
    return [tokens[at : at + WINDOW_TOKENS] for at in range(0, len(tokens), WINDOW_TOKENS)]


def negative_logs(logits: np.ndarray, window: list[int]) -> np.ndarray:
    """Minus the log-probability of each token after the first; `logits` [tokens, vocabulary] of the whole window."""
    rows = logits[:-1].astype(np.float64)
    peak = rows.max(axis=1)
    lse = np.log(np.exp(rows - peak[:, None]).sum(axis=1)) + peak
    return lse - rows[np.arange(len(rows)), window[1:]]


def perplexity(parts: list[np.ndarray]) -> float:
    return float(np.exp(np.concatenate(parts).mean()))


def widened(source: GGUFFile, path: Path) -> Path:
    """The same model with float32 weights."""
    made = []
    for name, info in source.tensors.items():
        raw = np.frombuffer(source.data(name), np.uint8).reshape(-1, row_bytes(info.type, info.ne[0]))
        made.append(TensorData(name, GGMLType.F32, info.ne[: info.n_dims], dequantize(info.type, raw)))
    metadata = {key: _typed(value) for key, value in source.metadata.items()}
    return write_gguf(path, {**metadata, "general.file_type": 0}, made)


def _typed(value: Any) -> Any:
    """Lists of integers as the types of tokens are stored."""
    return Typed(ValueType.INT32, value) if isinstance(value, list) and isinstance(value[0], int) else value


def measure(path: Path, tokens: list[list[int]], cache_type: int) -> float:
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=WINDOW_TOKENS, n_batch=WINDOW_TOKENS, n_ubatch=WINDOW_TOKENS, n_threads=1, logits_all=True,
        type_k=cache_type, type_v=cache_type, flash_attn=False, verbose=False,
    )  # fmt: skip
    parts = []
    for window in tokens:
        model.reset()
        model.eval(window)
        parts.append(negative_logs(np.array(model.scores)[: len(window)], window))
    model.close()
    return perplexity(parts)


def main(path: Path) -> None:
    source = GGUFFile.open(path)
    tokens = windows(Tokenizer.from_metadata(source.metadata))
    with tempfile.TemporaryDirectory() as folder:
        exact = measure(widened(source, Path(folder) / "wide.gguf"), tokens, GGMLType.F32)
    figures = {
        "made with": "llama-cpp-python 0.3.36",
        "model sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "text sha256": hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        "window tokens": WINDOW_TOKENS,
        "scored tokens": sum(len(window) - 1 for window in tokens),
        "exact": exact,
        "as it is": measure(path, tokens, GGMLType.F16),
    }
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    print(figures)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
