"""Settings: frozen, parsed once. Environment variables are read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def model_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where pulled models are kept: $XDG_CACHE_HOME/tandem/models, by default below ~/.cache."""
    base = environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "tandem", "models")
