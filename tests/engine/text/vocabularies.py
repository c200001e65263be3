"""Vocabularies to test with: those of the golden models, real ones where they were pulled, and small made-up ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from app.engine.gguf.reader import GGUFFile
from app.engine.text.special_ids import TokenType
from app.engine.text.tokenizer import Tokenizer
from tests.support import goldens_dir, model_path

TINY = (
    "gemma3-Q4_K_M",
    "gpt-oss-MXFP4_MOE",
    "llama-Q4_0",
    "llama-small-F16",
    "llama-yarn-Q8_0",
    "qwen2-Q8_0",
    "qwen35-Q4_K_M",
)

#: Golden file -> the name under which the real model is pulled.
REAL = {"smollm2-135m": "smollm2", "gemma3-270m": "gemma3-270m"}
GOLDENS = (*(f"tiny-{name}" for name in TINY), *REAL)


@cache
def golden(name: str) -> dict[str, Any]:
    path = goldens_dir() / "text" / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


@cache
def metadata_of(name: str) -> Mapping[str, Any]:
    path = model_path(REAL[name]) if name in REAL else goldens_dir() / "models" / f"{name.removeprefix('tiny-')}.gguf"
    return GGUFFile.open(path).metadata


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(metadata_of(name))


def tiny(name: str) -> Tokenizer:
    return tokenizer_of(f"tiny-{name}")


def vocabulary(
    model: str, tokens: Sequence[str | bytes], types: Mapping[str, TokenType] | None = None, **keys: Any
) -> dict[str, Any]:
    """Metadata of a made-up vocabulary; all tokens normal but those that `types` names."""
    kinds = types or {}
    texts = [token.decode("utf-8", "replace") if isinstance(token, bytes) else token for token in tokens]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [int(kinds.get(text, TokenType.NORMAL)) for text in texts],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }
