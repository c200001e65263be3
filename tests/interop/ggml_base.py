"""Where upstream's libggml-base is, for tests that call its C functions."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

_IN_VENV = "interop-venv/lib/python3*/site-packages/llama_cpp/lib/libggml-base.so"


def ggml_base() -> ctypes.CDLL:
    """The build named by TANDEM_GGML_BASE, or that of llama-cpp-python in the cache of the interop tests. Or skips."""
    if "TANDEM_GGML_BASE" in os.environ:
        return ctypes.CDLL(os.environ["TANDEM_GGML_BASE"])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
    found: list[Path] = sorted(cache.glob(_IN_VENV))
    if not found:
        pytest.skip("no libggml-base.so; set TANDEM_GGML_BASE")
    return ctypes.CDLL(str(found[0]))
