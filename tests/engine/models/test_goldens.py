"""Every architecture against logits of an independent engine, with float32 activations and a float32 cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.models import registry
from tests.engine.models.runner import Runner
from tests.support import goldens_dir

#: Limits for rms and maximum of engine minus golden; GELU goes through a 16-bit table in the golden's engine.
LIMITS = {"gemma3": (3e-3, 3e-2)}
DEFAULT_LIMITS = (2e-4, 2e-3)
#: Models that are the same as llama-Q4_1 in everything but the type of their weights.
ONLY_ANOTHER_TYPE = {
    f"llama-{name}"
    for name in (
        "Q8_0 Q4_0 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M "
        "TQ1_0 TQ2_0 MXFP4 small-F16 small-BF16"
    ).split()
}


def golden_names() -> list[str]:
    try:
        folder = goldens_dir() / "models"
    except pytest.skip.Exception:
        return []
    return sorted(path.stem for path in folder.glob("*.gguf"))


def is_served(path: Path) -> bool:
    return GGUFFile.open(path).text("general.architecture") in registry.ARCHITECTURES


every = pytest.mark.parametrize("case", golden_names() or ["none"], indirect=True, scope="module")
distinct = pytest.mark.parametrize(
    "case", [n for n in golden_names() if n not in ONLY_ANOTHER_TYPE] or ["none"], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Runner, dict[str, np.ndarray], tuple[float, float]]]:
    path = goldens_dir() / "models" / f"{request.param}.gguf"
    if not is_served(path):
        pytest.skip("architecture not served yet")
    runner = Runner(NumpyDevice(), GGUFFile.open(path))
    logits = np.load(goldens_dir() / "logits" / f"{request.param}.npz")
    yield runner, logits, LIMITS.get(runner.model.architecture, DEFAULT_LIMITS)
    runner.close()


def check(difference: np.ndarray, limits: tuple[float, float], what: str) -> None:
    rms, top = np.sqrt(np.mean(difference.astype(np.float64) ** 2)), np.abs(difference).max()
    assert rms <= limits[0] and top <= limits[1], f"{what}: rms {rms:.2e}, max {top:.2e}"


@every
@pytest.mark.parametrize("n", [33, 300])
def test_logits(case, n: int) -> None:
    check_logits(case, n)


@distinct
@pytest.mark.parametrize("n", [1, 7, 100])
def test_logits_at_other_lengths(case, n: int) -> None:
    check_logits(case, n)


def check_logits(case, n: int) -> None:
    runner, golden, limits = case
    runner.forget()
    got = runner.logits(golden[f"tokens_{n}"].tolist())
    check(got[-1] - golden[f"exact_last_{n}"], limits, "last position")
    chosen = np.take_along_axis(got, golden[f"exact_top_ids_{n}"].astype(np.int64), axis=1)
    check(chosen - golden[f"exact_top_val_{n}"], limits, "best tokens of every position")
    peak = got.max(axis=1, keepdims=True)
    lse = np.log(np.exp((got - peak).astype(np.float64)).sum(axis=1)) + peak[:, 0]
    check(lse - golden[f"exact_lse_{n}"], limits, "log of the sum of exponentials")


@every
def test_residual_stream_after_every_layer(case) -> None:
    runner, golden, limits = case
    runner.forget()
    residuals: list[np.ndarray] = []
    runner.batch({0: golden["tokens_33"].tolist()}, [32], residuals=residuals)
    for layer, (got, want) in enumerate(zip(residuals, golden["exact_hidden_33"], strict=True)):
        scale = max(1.0, float(np.sqrt(np.mean(want.astype(np.float64) ** 2))))
        check((got - want) / scale, limits, f"layer {layer}")


def follow(golden: dict[str, np.ndarray], n: int, limits: tuple[float, float], token_at: Callable[[int], int]) -> None:
    """Greedy tokens one by one; a first mismatch is an error only where the golden's lead was clear."""
    for step, want in enumerate(golden[f"exact_greedy_{n}"].tolist()):
        token = token_at(step)
        if token != want:
            assert golden[f"exact_lead_{n}"][step] <= 6 * limits[0], f"step {step}: {token} instead of {want}"
            return


@every
@pytest.mark.parametrize("n", [7, 100])
def test_greedy_continuation_read_at_once(case, n: int) -> None:
    runner, golden, limits = case
    runner.forget()
    tokens = [*golden[f"prompt_{n}"].tolist(), *golden[f"exact_greedy_{n}"].tolist()[:-1]]
    best = runner.logits(tokens, range(n - 1, len(tokens))).argmax(axis=1)
    follow(golden, n, limits, lambda step: int(best[step]))


@distinct
def test_greedy_continuation_token_by_token(case) -> None:
    runner, golden, limits = case
    runner.forget()
    tokens = golden["prompt_100"].tolist()

    def token_at(step: int) -> int:
        tokens[:] = [int(runner.logits(tokens, [len(tokens) - 1])[0].argmax())]
        return tokens[0]

    follow(golden, 100, limits, token_at)


@distinct
@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_chunks_of_any_size_give_the_same_logits(case, chunk: int) -> None:
    """What the cache and the recurrent state carry from one ubatch to the next."""
    runner, golden, limits = case
    tokens = golden["tokens_33"].tolist()
    runner.forget()
    parts = [runner.logits(tokens[i : i + chunk]) for i in range(0, 33, chunk)]
    check(parts[-1][-1] - golden["exact_last_33"], limits, "last position")


@distinct
def test_two_sequences_in_one_ubatch_do_not_see_each_other(case) -> None:
    runner, golden, limits = case
    runner.forget()
    first, second = golden["tokens_7"].tolist(), golden["tokens_33"].tolist()
    runner.batch({1: second[:26]})
    got = runner.batch({0: first, 1: second[26:]}, [6, 13])
    check(got[0] - golden["exact_last_7"], limits, "first sequence")
    check(got[1] - golden["exact_last_33"], limits, "second sequence")


#: Cache type: limits for rms and maximum. F16 by the goldens' own table, the others about twice what is right.
CACHE_LIMITS = {
    GGMLType.F16: (3 * 2.9e-3, 3 * 2.0e-2),
    GGMLType.BF16: (0.035, 0.2),
    GGMLType.Q8_0: (0.1, 0.4),
    GGMLType.Q5_1: (0.7, 3.0),
    GGMLType.Q5_0: (0.8, 3.0),
    GGMLType.Q4_1: (1.5, 5.0),
    GGMLType.Q4_0: (1.7, 6.0),
    GGMLType.IQ4_NL: (1.5, 6.0),
}


@pytest.mark.parametrize("kv_type", CACHE_LIMITS, ids=lambda t: t.name)
def test_cache_types_cost_what_their_precision_costs(kv_type: GGMLType) -> None:
    golden = np.load(goldens_dir() / "logits" / "llama-Q4_1.npz")
    file = GGUFFile.open(goldens_dir() / "models" / "llama-Q4_1.gguf")
    with closing(Runner(NumpyDevice(), file, kv_type=kv_type)) as runner:
        got = runner.logits(golden["tokens_100"].tolist())
    chosen = np.take_along_axis(got, golden["exact_top_ids_100"].astype(np.int64), axis=1)
    check(chosen - golden["exact_top_val_100"], CACHE_LIMITS[kv_type], kv_type.name)
