"""Which model file serves which `general.architecture`.

A new family is a subclass of `Decoder` that overrides what is its own (`qwen3.py` is the shortest with something to
say, `gemma3.py` and `qwen35.py` show layers and mixers of their own), a line here, and a recipe in
`tests/fakes/architectures.py` whose logits `tests/engine/models/make_goldens.py` takes from the reference. Its graphs
should need no op that `app/engine/opcheck` does not know; one more op is a rule there, a numpy reference and a kernel.
"""

from __future__ import annotations

from app.engine.gguf.reader import GGUFFile
from app.engine.models.decoder import Decoder
from app.engine.models.gemma3 import Gemma3
from app.engine.models.gpt_oss import GptOss
from app.engine.models.granite import Granite
from app.engine.models.llama import Llama
from app.engine.models.mistral3 import Mistral3
from app.engine.models.phi3 import Phi3
from app.engine.models.qwen2 import Qwen2
from app.engine.models.qwen3 import Qwen3
from app.engine.models.qwen35 import Qwen3Next, Qwen35
from app.engine.models.smollm3 import SmolLM3
from app.errors import UnsupportedModel

ARCHITECTURES: dict[str, type[Decoder]] = {
    "gemma3": Gemma3,
    "gpt-oss": GptOss,
    "granite": Granite,
    "granitemoe": Granite,
    "llama": Llama,
    "mistral3": Mistral3,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3moe": Qwen3,
    "qwen35": Qwen35,
    "qwen35moe": Qwen35,
    "qwen3next": Qwen3Next,
    "smollm3": SmolLM3,
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
