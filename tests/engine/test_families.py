"""Every family of models through the engine: a reused prefix and a split give what a cold run on one device gives.

Experts, sliding windows, sinks, temperatures by position and long rope factors all meet the cache here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.architectures import write_model
from tests.fakes.splits import local, workers
from tests.fakes.talker import Reply, Talker, assert_same, talker
from tests.support import goldens_dir

GOLDENS = ("qwen3moe-Q4_K_M", "gemma3-Q4_K_M", "gpt-oss-MXFP4_MOE")
OWN = ("gemma3-softcap", "granitemoe", "llama-longrope-long", "mistral3", "mixtral", "phi3-long", "smollm3")

#: Longer than the goldens' windows of 64, and over several blocks and ubatches.
PREFIX = np.random.default_rng(7).integers(33, 200, 150).tolist()
ENDINGS = [np.random.default_rng(8 + i).integers(33, 200, n).tolist() for i, n in enumerate((20, 35, 1))]
N_ANSWER = 6


@pytest.fixture(scope="module", params=[*GOLDENS, *OWN])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in GOLDENS:
        return goldens_dir() / "models" / f"{request.param}.gguf"
    return write_model(tmp_path_factory.mktemp("families") / "model.gguf", request.param)


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[list[Reply]]:
    """Answers of one device that reuses nothing."""
    with talker(model) as talking:
        yield [ask(talking, ending, cache_prompt=False) for ending in ENDINGS]


def ask(talking: Talker, ending: list[int], **fields: object) -> Reply:
    return talking.ask([*PREFIX, *ending], N_ANSWER, **fields)


@pytest.mark.parametrize("devices", [local(1), local(2), workers(1, n_local=1)], ids=["one", "two", "worker"])
def test_reuse_and_splits_change_nothing(model: Path, cold: list[Reply], devices) -> None:  # type: ignore[no-untyped-def]
    with talker(model, devices) as talking:
        for n, (ending, want) in enumerate(zip(ENDINGS, cold, strict=True)):
            reply = ask(talking, ending)
            assert reply.cached == (len(PREFIX) if n else 0)
            assert reply.prompt_rows == len(PREFIX) + len(ending) - reply.cached
            assert_same(reply, want)


def test_company_changes_nothing(model: Path, cold: list[Reply]) -> None:
    with talker(model, n_slots=3, n_ubatch=48) as talking:
        wanted = [([*PREFIX, *ending], N_ANSWER, {"cache_prompt": False}) for ending in ENDINGS]
        for reply, want in zip(talking.run(talking.all(*wanted)), cold, strict=True):
            assert_same(reply, want)
