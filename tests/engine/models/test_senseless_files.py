"""Numbers of one family that make no sense, and blocks that are not what the file's counts make of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from app.engine.gguf.layout import ValueType
from app.engine.gguf.reader import GGUFFile
from app.engine.gguf.writer import TensorData, Typed, write_gguf
from app.engine.models import registry
from app.engine.models.decoder import Decoder
from app.errors import FormatError
from tests.fakes.architectures import RECIPES, write_model
from tests.support import goldens_dir


@pytest.fixture
def make(tmp_path: Path):
    def made(name: str, **changes: object) -> Decoder:
        return registry.load(GGUFFile.open(write_model(tmp_path / "m.gguf", name, **changes)))

    return made


@pytest.mark.parametrize(
    ("name", "key", "value", "match"),
    [
        ("qwen3next", "full_attention_interval", 0, "full_attention_interval is 0, expected 1 or more layers"),
        ("gemma3-softcap", "attention.sliding_window", -1, "sliding_window is -1, expected 0 or more tokens"),
        ("gemma3-softcap", "attention.sliding_window_pattern", -2, "sliding_window_pattern is -2, expected a period"),
        ("gemma3-softcap", "final_logit_softcapping", math.nan, "softcapping is nan, expected a finite number"),
        ("gemma3-softcap", "rope.freq_base_swa", 1.0, "freq_base_swa is 1.0, expected more than 1"),
        ("mistral3", "rope.scaling.yarn_beta_fast", 0.0, "yarn_beta_fast is 0.0, expected more than 0"),
        ("gemma3-softcap", "final_logit_softcapping", 1e-40, "softcapping is .*e-41, expected 0 or 1e-15 to 1e.15"),
        ("gemma3-softcap", "rope.scaling.factor", 1e-40, "factor is .*e-41, expected 0 or 1e-15 to 1e.15"),
        ("gemma3-softcap", "rope.dimension_count", 0, "dimension_count is 0, expected an even number of channels"),
        ("llama-yarn", "rope.scaling.attn_factor", 1e30, "attn_factor is .*, expected 0 or 1e-15 to 1e.15"),
        ("granite", "logit_scale", math.inf, "logit_scale is inf, expected a finite number"),
        ("mixtral", "expert_used_count", Typed(ValueType.UINT32, []), "expert_used_count is .., expected a number, or"),
    ],
)
def test_keys_of_one_family_that_make_no_sense(make, name: str, key: str, value: object, match: str) -> None:
    architecture = RECIPES[name].architecture
    with pytest.raises(FormatError, match=rf"{architecture}\..*{match}"):
        make(name, **{f"{architecture}.{key}": value})


def test_an_original_context_of_zero_is_the_models_own(make) -> None:
    model = make("mistral3", **{"mistral3.rope.scaling.original_context_length": 0})
    assert model.rope.n_ctx_orig == model.n_ctx_train and model.attn_scale(5) == 1.0


def test_layers_must_not_pass_for_prediction_blocks(make) -> None:
    with pytest.raises(FormatError, match=r"block 1 holds a layer's tensors .*nextn_predict_layers is 1 of 2 blocks"):
        make("llama-linear", **{"llama.nextn_predict_layers": 1})


@pytest.mark.parametrize("sections", [[0, 0, 0, 0], [8, -1, 8, 0], [(1 << 31) - 1, (1 << 31) - 1, 2, 0]])
def test_rope_sections_that_make_no_sense(tmp_path: Path, sections: list[int]) -> None:
    path = rewritten(tmp_path, {"qwen35.rope.dimension_sections": Typed(ValueType.INT32, sections)})
    with pytest.raises(FormatError, match=r"qwen35\.rope\.dimension_sections is .*, expected four counts of pairs"):
        registry.load(GGUFFile.open(path))


def test_prediction_blocks_must_not_pass_for_layers(tmp_path: Path) -> None:
    changes = {"qwen35.nextn_predict_layers": 0, "qwen35.block_count": 4}
    path = rewritten(tmp_path, {**changes, "qwen35.attention.recurrent_layers": [True, True, False, False]})
    with pytest.raises(FormatError, match=r"block 3 holds tensors for prediction, but .*is 0 of 4 blocks"):
        registry.load(GGUFFile.open(path))


def test_prediction_blocks_may_be_cut_away(tmp_path: Path) -> None:
    assert registry.load(GGUFFile.open(rewritten(tmp_path, {}, without="blk.3."))).unused_tensors == ()


def rewritten(folder: Path, changes: dict[str, object], without: str = "?") -> Path:
    """The golden with a prediction block, with other metadata and without tensors of that beginning; no tokenizer."""
    with GGUFFile.open(goldens_dir() / "models" / "qwen35-mtp-Q5_K_M.gguf") as golden:
        kept = [info for name, info in golden.tensors.items() if not name.startswith(without)]
        tensors = [TensorData(i.name, i.type, i.ne[: i.n_dims], bytes(golden.data(i.name))) for i in kept]
        metadata = {**golden.metadata, **changes}
    return write_gguf(folder / "rewritten.gguf", metadata, tensors)
