"""How far the native kernels and llama.cpp's stand from exact arithmetic, token by token, on the same real text.

    PYTHONPATH=$HOME/.cache/tandem/interop-venv/lib/python3.11/site-packages \
        python -m bench.perplexity MODEL.gguf TEXT --windows 100

Needs llama-cpp-python, as `make interop` builds it. "exact" is llama.cpp with weights widened to float32 and a float32
cache. Every window starts from nothing, each engine reads it whole, and every token but the first is scored. Errors are
standard errors over tokens, of the difference to exact where one is meant: they say what the text's length can show.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from app.engine.devices.cpu import CpuDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.text.tokenizer import Tokenizer
from tests.engine.make_perplexity import WINDOW_TOKENS, widened
from tests.fakes.stack import Stack

Logits = Callable[[list[int]], np.ndarray]  # tokens of a window -> [tokens, vocabulary]


def llama(path: Path, cache_type: GGMLType) -> Logits:
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=WINDOW_TOKENS, n_batch=WINDOW_TOKENS, n_ubatch=WINDOW_TOKENS, n_threads=2, logits_all=True,
        type_k=cache_type, type_v=cache_type, flash_attn=False, verbose=False,
    )  # fmt: skip

    def logits(window: list[int]) -> np.ndarray:
        model.reset()
        model.eval(window)
        return np.array(model.scores)[: len(window)]

    return logits


def native(gguf: GGUFFile) -> Logits:
    stack = Stack(gguf, [CpuDevice("CPU")], cache_type=GGMLType.F16, n_cells=WINDOW_TOKENS, max_outputs=WINDOW_TOKENS)

    def logits(window: list[int]) -> np.ndarray:
        stack.restart()
        return stack.feed(window, every=True)

    return logits


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def measure(engines: dict[str, Logits], windows: list[list[int]]) -> dict[str, Any]:
    """Per engine: perplexity, its ratio to exact with an error, and the mean Kullback-Leibler distance from exact."""
    losses: dict[str, list[np.ndarray]] = {name: [] for name in engines}
    distances: dict[str, list[np.ndarray]] = {name: [] for name in engines}
    for window in windows:
        exact = log_probabilities(engines["exact"](window))
        chosen = (np.arange(len(exact)), window[1:])
        for name, logits in engines.items():
            rows = exact if name == "exact" else log_probabilities(logits(window))
            losses[name].append(-rows[chosen])
            distances[name].append((np.exp(exact) * (exact - rows)).sum(axis=1))
    exact_losses = np.concatenate(losses["exact"])
    found: dict[str, Any] = {"scored tokens": len(exact_losses)}
    for name in engines:
        mine = np.concatenate(losses[name])
        shift, error = mean_and_error(mine - exact_losses)
        found[name] = {
            "perplexity": float(np.exp(mine.mean())),
            "over exact": float(np.exp(shift)),
            "error of that": error,
            "mean KL from exact": mean_and_error(np.concatenate(distances[name]))[0],
        }
    shift, error = mean_and_error(np.concatenate(losses["native"]) - np.concatenate(losses["llama.cpp"]))
    found["native over llama.cpp"] = {"ratio": float(np.exp(shift)), "error of that": error}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=40, help="how many windows of 512 tokens, at most")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    arguments = parser.parse_args()
    gguf = GGUFFile.open(arguments.model)
    text = arguments.text.read_text(encoding="utf-8")
    tokens = Tokenizer.from_metadata(gguf.metadata).encode(text, add_special=False, parse_special=False)
    windows = [tokens[at : at + WINDOW_TOKENS] for at in range(0, len(tokens), WINDOW_TOKENS)][: arguments.windows]
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            "exact": llama(widened(gguf, Path(folder) / "wide.gguf"), GGMLType.F32),
            "llama.cpp": llama(arguments.model, GGMLType.F16),
            "native": native(gguf),
        }
        found = measure(engines, windows)
    found = {"model": arguments.model.name, "text": arguments.text.name, **found}
    print(json.dumps(found, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
