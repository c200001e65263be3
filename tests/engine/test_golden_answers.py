"""Greedy answers of the whole engine on one, two and three devices are the goldens', as far as those are clear."""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.request import SamplingParams
from tests.engine.models.test_goldens import DEFAULT_LIMITS, LIMITS, ONLY_ANOTHER_TYPE, follow, golden_names
from tests.fakes.splits import local
from tests.fakes.talker import talker
from tests.support import goldens_dir

GREEDY = SamplingParams(temperature=0.0)
NAMES = [name for name in golden_names() if name not in ONLY_ANOTHER_TYPE]


@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES or ["none"])
def test_greedy_answers(name: str, n_devices: int) -> None:
    golden = dict(np.load(goldens_dir() / "logits" / f"{name}.npz"))
    limits = LIMITS.get(name.partition("-")[0], DEFAULT_LIMITS)
    with talker(goldens_dir() / "models" / f"{name}.gguf", local(n_devices), n_ubatch=48) as talking:
        for n in (7, 100):
            want = golden[f"exact_greedy_{n}"].tolist()
            tokens = talking.ask(golden[f"prompt_{n}"].tolist(), 32, sampling=GREEDY).tokens
            if len(tokens) < 32 and tokens == want[: len(tokens)]:  # ours ends where the goldens go on
                assert want[len(tokens)] in talking.engine.tokenizer.eog
                tokens += want[len(tokens) :]
            follow(golden, n, limits, tokens.__getitem__)
