"""Where tests find what does not lie in the repository: goldens of an independent engine, and real models.

A test that needs something absent skips, and says what to do about it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app import models_store
from app.settings import DEFAULT_MODEL

REPO = Path(__file__).resolve().parents[1]


def goldens_dir() -> Path:
    """The directory of golden logits, tokens and templates. Skips the test when there is none."""
    place = Path(os.environ.get("TANDEM_GOLDENS", REPO.parent / "shared" / "goldens"))
    if not (place / "manifest.json").is_file():
        pytest.skip(f"no goldens at {place}; set TANDEM_GOLDENS")
    return place


def model_path(name: str = DEFAULT_MODEL) -> Path:
    """A real model that was pulled before. Skips the test when it was not; tests never download by themselves."""
    path = models_store.cached(name)
    if path is None:
        pytest.skip(f"model {name} is not in the cache; run `tandem pull {name}`")
    return path
