"""Which model file serves which `general.architecture`."""

from __future__ import annotations

from app.engine.gguf.reader import GGUFFile
from app.engine.models.base import Model
from app.errors import UnsupportedModel

ARCHITECTURES: dict[str, type[Model]] = {}


def load(gguf: GGUFFile, *, n_ctx: int | None = None) -> Model:
    """The model of a file, its tensors checked against its hyperparameters.

    `n_ctx` is the context one sequence will have (it chooses between short and long rope factors).
    Raises UnsupportedModel for an architecture we do not run, FormatError for tensors that do not fit.
    """
    del n_ctx
    architecture = str(gguf.metadata.get("general.architecture", ""))
    raise UnsupportedModel(
        f"architecture {architecture!r} is not one this server runs; known are {', '.join(sorted(ARCHITECTURES))}"
    )
