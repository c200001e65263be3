"""Which model file serves which `general.architecture`."""

from __future__ import annotations

from app.engine.gguf.reader import GGUFFile
from app.engine.models.decoder import Decoder
from app.engine.models.llama import Llama
from app.errors import UnsupportedModel

ARCHITECTURES: dict[str, type[Decoder]] = {
    "llama": Llama,
}


def load(gguf: GGUFFile, *, n_ctx: int | None = None) -> Decoder:
    """The model of a file, its tensors checked against its hyperparameters.

    `n_ctx` is the context one sequence will have (it chooses between short and long rope factors).
    Raises UnsupportedModel for an architecture we do not run, FormatError for tensors that do not fit.
    """
    architecture = gguf.text("general.architecture")
    kind = ARCHITECTURES.get(architecture)
    if kind is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{gguf.path}: architecture {architecture!r} is not supported; known are {known}")
    return kind(gguf, n_ctx)
