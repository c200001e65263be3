"""Every golden model on the native device: no further from exact than the rounding of activations to 8 bits explains.

The limits are the goldens' own: by how much another engine that rounds alike is off, with some room.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest

from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from tests.engine.models.runner import Runner
from tests.engine.models.test_goldens import every, is_served
from tests.engine.models.test_real import MODELS
from tests.support import goldens_dir, model_path

cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")

#: Times the other engine's own distance from exact.
RMS_ROOM, MAX_ROOM = 1.5, 2.0
TOP1_ROOM = 0.05


@dataclass
class Case:
    runner: Runner
    golden: dict[str, np.ndarray]
    rms_limit: float
    max_limit: float
    top1_limit: float


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    path = goldens_dir() / "models" / f"{request.param}.gguf"
    if not is_served(path):
        pytest.skip("architecture not served yet")
    theirs = json.loads((goldens_dir() / "manifest.json").read_text())[path.name]["difference"]["exact vs fa0"]
    golden = dict(np.load(goldens_dir() / "logits" / f"{request.param}.npz"))
    runner = Runner(cpu.CpuDevice("CPU", 2), GGUFFile.open(path), kv_type=GGMLType.F16)
    limits = (RMS_ROOM * theirs["rms"], MAX_ROOM * theirs["max_abs"], theirs["top1_agree"] - TOP1_ROOM)
    yield Case(runner, golden, *limits)
    runner.close()


@every
def test_logits(case: Case) -> None:
    differences, agree = [], []
    for n in (1, 33, 300):
        case.runner.forget()
        got = case.runner.logits(case.golden[f"tokens_{n}"].tolist())
        best = case.golden[f"exact_top_ids_{n}"].astype(np.int64)
        chosen = np.take_along_axis(got, best, axis=1) - case.golden[f"exact_top_val_{n}"]
        differences += [chosen.ravel(), got[-1] - case.golden[f"exact_last_{n}"]]
        agree.append(got.argmax(axis=1) == best[:, 0])
    difference = np.concatenate(differences).astype(np.float64)
    assert np.sqrt(np.mean(difference**2)) <= case.rms_limit
    assert np.abs(difference).max() <= case.max_limit
    assert np.concatenate(agree).mean() >= case.top1_limit


@every
@pytest.mark.parametrize("n", [7, 100])
def test_greedy_continuation(case: Case, n: int) -> None:
    """Token by token until the first mismatch, which must be where the golden's lead was small."""
    case.runner.forget()
    want = case.golden[f"exact_greedy_{n}"].tolist()
    best = case.runner.logits([*case.golden[f"prompt_{n}"].tolist(), *want[:-1]], range(n - 1, n + 31)).argmax(axis=1)
    step = next((i for i, (ours, theirs) in enumerate(zip(best.tolist(), want, strict=True)) if ours != theirs), None)
    assert step is None or case.golden[f"exact_lead_{n}"][step] <= 6 * case.rms_limit


@every
def test_pieces_give_the_same_bytes(case: Case) -> None:
    """No order of a sum depends on the ubatch, so cache and state carry exactly what they should."""
    tokens = case.golden["tokens_33"].tolist()
    case.runner.forget()
    want = case.runner.logits(tokens)[-1]
    for chunk in (1, 7):
        case.runner.forget()
        pieces = [tokens[at : at + chunk] for at in range(0, 33, chunk)]
        got = [case.runner.logits(piece, [len(piece) - 1]) for piece in pieces]
        assert np.array_equal(got[-1][-1], want)


@pytest.mark.slow
@pytest.mark.parametrize(("golden", "name"), MODELS, ids=lambda name: name)
def test_real_models(golden: str, name: str) -> None:
    logits = np.load(goldens_dir() / "real" / f"{golden}.npz")
    prompts = json.loads((goldens_dir() / "real" / f"{golden}.json").read_text())["prompts"]
    with closing(Runner(cpu.CpuDevice("CPU", 2), GGUFFile.open(model_path(name)), kv_type=GGMLType.F16)) as runner:
        agree, expected = [], []
        for prompt in ("one_word", "story", "python", "chinese", "chat"):
            theirs = prompts[prompt]["difference"]["exact vs fa0"]
            runner.forget()
            got = runner.logits(logits[f"{prompt}_tokens"].tolist())
            best = logits[f"{prompt}_exact_top_ids"].astype(np.int64)
            difference = np.take_along_axis(got, best, axis=1) - logits[f"{prompt}_exact_top_val"]
            assert np.sqrt(np.mean(difference**2)) <= RMS_ROOM * theirs["rms"], prompt
            agree += (got.argmax(axis=1) == best[:, 0]).tolist()
            expected += [theirs["top1_agree"]] * len(best)
    assert np.mean(agree) >= np.mean(expected) - TOP1_ROOM
