"""The sampler as a whole: order of the steps, seeds, greedy, logprobs, masks, statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from app.engine.request import SamplingParams
from app.engine.rows import WholeRow
from app.engine.serving import filters
from app.engine.serving.filters import Race
from app.engine.serving.randomness import uniform
from app.engine.serving.sampler import Sampler, score
from app.errors import DeviceError, InvalidParameter, NoTokenLeft

N_VOCAB = 1000
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits_of(seed: int = 0, n: int = N_VOCAB, width: float = 2.5) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, width, n).astype(np.float32)


def sampler(prompt: tuple[int, ...] = (1, 2, 3), *, n_vocab: int = N_VOCAB, **params) -> Sampler:
    return Sampler(SamplingParams(**{"seed": 42, **params}), prompt, n_vocab=n_vocab, eog=(5, 6))


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-9, 1e-300])
def test_no_temperature_takes_the_best_and_the_lowest_of_equals(temperature: float) -> None:
    logits = logits_of()
    logits[[700, 300]] = logits.max() + 1
    for seed in (1, 2):
        assert sampler(temperature=temperature, seed=seed, xtc_probability=1.0).sample(WholeRow(logits), 9).token == 300


def test_a_small_temperature_is_next_to_greedy_and_makes_no_nan() -> None:
    logits = logits_of()
    for temperature in (2e-6, 1e-4, 1e-2):
        for params in (PLAIN, {}, {"mirostat": 2}):
            drawn = sampler(temperature=temperature, n_logprobs=2, **params).sample(WholeRow(logits), 9)
            assert drawn.token == int(logits.argmax())
            assert drawn.logprob is not None and math.isfinite(drawn.logprob)


def test_a_draw_depends_on_seed_and_position_and_not_on_what_came_before() -> None:
    rows = [logits_of(i) for i in range(30)]
    one = sampler(temperature=1.0)
    tokens = [one.sample(WholeRow(row), 100 + i).token for i, row in enumerate(rows)]
    again = sampler(temperature=1.0)
    assert [again.sample(WholeRow(row), 100 + i).token for i, row in reversed(list(enumerate(rows)))][::-1] == tokens
    other = sampler(temperature=1.0, seed=43)
    assert [other.sample(WholeRow(row), 100 + i).token for i, row in enumerate(rows)] != tokens


def test_a_seed_may_be_any_integer_and_none_takes_the_given_one() -> None:
    logits = logits_of()
    for seed in (-1, 2**63, 2**64 + 5):
        sampler(seed=seed).sample(WholeRow(logits), 3)
    given = Sampler(SamplingParams(seed=None), (1,), n_vocab=N_VOCAB, seed=42)
    assert [given.sample(WholeRow(logits), i).token for i in range(20)] == [
        sampler().sample(WholeRow(logits), i).token for i in range(20)
    ]


def test_the_steps_come_in_order() -> None:
    params = SamplingParams(
        temperature=1.7,
        top_k=50,
        typical_p=0.9,
        top_p=0.8,
        min_p=0.1,
        xtc_probability=0.5,
        xtc_threshold=0.1,
        min_keep=2,
    )
    one = Sampler(params, (1,), n_vocab=N_VOCAB, seed=7)
    n_excluded = 0
    for position in range(100):
        logits = logits_of(position)
        left = filters.best(logits.max() - logits, 50)
        left = filters.near(filters.top_p(filters.typical(left, 0.9, 2), 0.8, 2), -math.log(0.1), 2)
        if uniform(7, position, 1) <= 0.5:
            n_before = np.isfinite(left).sum()
            left = filters.exclude_top(left, 0.1, 2)
            n_excluded += np.isfinite(left).sum() < n_before
        token, _ = filters.draw(-left, Race(scale=1 / 1.7), uniform(7, position, 0))
        assert one.sample(WholeRow(logits), position).token == token
    assert n_excluded > 5


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        {**PLAIN, "temperature": 1.5},
        {**PLAIN, "top_p": 0.7},
        {**PLAIN, "min_p": 0.2},
        {**PLAIN, "top_k": 5},
        {**PLAIN, "typical_p": 0.6},
        {**PLAIN, "xtc_probability": 1.0, "xtc_threshold": 0.1},
        {},
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(params: dict[str, float]) -> None:
    n_vocab, n_draws = 12, 6000
    logits = logits_of(4, n_vocab, 1.2)
    one = sampler((), n_vocab=n_vocab, **params)
    counts = np.bincount([one.sample(WholeRow(logits), i).token for i in range(n_draws)], minlength=n_vocab)
    want = expected_distribution(logits, one.params)
    assert counts[want == 0].sum() == 0
    some = want > 0
    chi_squared = float(((counts - n_draws * want) ** 2)[some].dot(1 / (n_draws * want[some])))
    assert chi_squared < 2.0 * some.sum() + 25


def expected_distribution(logits: NDArray[np.float32], p: SamplingParams) -> NDArray[np.float64]:
    """By the definitions, over a small vocabulary."""
    left = filters.best(logits.max() - logits, p.top_k or len(logits))
    if p.typical_p < 1.0:
        left = filters.typical(left, p.typical_p, 1)
    left = filters.near(filters.top_p(left, p.top_p, 1), -math.log(p.min_p) if p.min_p else math.inf, 1)
    if p.xtc_probability:
        left = filters.exclude_top(left, p.xtc_threshold, 1)
    weights = np.exp(-left.astype(np.float64) / p.temperature)
    return np.asarray(weights / weights.sum())


def test_mirostat_brings_surprise_to_tau() -> None:
    logits = logits_of(1, 20_000, 1.5)
    one = sampler(n_vocab=20_000, temperature=1.0, mirostat=2, mirostat_tau=4.0, mirostat_eta=0.1)
    surprises = []
    for position in range(600):
        most = one.mu * math.log(2)
        drawn = one.sample(WholeRow(logits), position).token
        weights = np.exp(logits.astype(np.float64))
        left = weights[logits >= math.log(weights.sum()) - most]
        share = weights[drawn] / left.sum()
        surprises.append(-math.log2(share))
    assert np.mean(surprises[200:]) == pytest.approx(4.0, abs=0.3)


def test_mirostat_1_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="mirostat 1"):
        sampler(mirostat=1)


def test_logprobs_are_the_models_own_whatever_the_filters() -> None:
    logits = logits_of()
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    one = sampler(temperature=1.9, n_logprobs=5, logit_bias={3: 4.0}, repeat_penalty=1.3, presence_penalty=1.0, top_k=3)
    drawn = one.sample(WholeRow(logits), 8)
    order = sorted(range(N_VOCAB), key=lambda i: (-logits[i], i))
    assert drawn.logprob == pytest.approx(exact[drawn.token], abs=1e-5)
    assert [t.token for t in drawn.top] == order[:5]
    assert [t.logprob for t in drawn.top] == pytest.approx(exact[order[:5]].tolist(), abs=1e-5)


def test_logprobs_can_be_without_alternatives_or_not_there() -> None:
    logits = logits_of()
    drawn = sampler(n_logprobs=0).sample(WholeRow(logits), 8)
    assert drawn.logprob is not None and drawn.top == ()
    assert sampler().sample(WholeRow(logits), 8).logprob is None


def test_a_certain_token_has_logprob_zero_and_ties_go_to_the_lower_id() -> None:
    logits = np.full(5000, -1000.0, dtype=np.float32)
    logits[4321] = 1000.0
    known = score(WholeRow(logits), 4321, 3)
    assert known.logprob == 0.0
    assert [t.token for t in known.top] == [4321, 0, 1]


def test_scoring_a_known_token() -> None:
    logits = logits_of()
    worst = int(logits.argmin())
    known = score(WholeRow(logits), worst, 2)
    assert known.token == worst
    assert known.logprob is not None and known.logprob < known.top[1].logprob <= known.top[0].logprob <= 0


def test_bias_bans_and_forces() -> None:
    logits = logits_of()
    best = int(logits.argmax())
    assert sampler(temperature=0, logit_bias={best: -100.0}).sample(WholeRow(logits), 1).token != best
    assert sampler(temperature=0, logit_bias={best: -math.inf}).sample(WholeRow(logits), 1).token != best
    assert sampler(temperature=1.0, logit_bias={17: 100.0}).sample(WholeRow(logits), 1).token == 17
    with pytest.raises(InvalidParameter, match="token 1000"):
        sampler(logit_bias={N_VOCAB: 1.0})


def test_ignore_eos_never_draws_an_end() -> None:
    logits = logits_of()
    logits[[5, 6]] = 30.0
    assert sampler(temperature=0).sample(WholeRow(logits), 1).token == 5
    one = sampler(ignore_eos=True, logit_bias={5: 100.0}, **PLAIN)
    assert not {one.sample(WholeRow(logits), i).token for i in range(50)} & {5, 6}


@pytest.mark.parametrize("params", [{"temperature": 0}, PLAIN, {}, {"mirostat": 2}], ids=str)
def test_a_mask_leaves_only_what_it_allows(params: dict[str, float]) -> None:
    logits = logits_of()
    allowed = np.zeros(N_VOCAB, dtype=np.bool_)
    allowed[[3, 64, 999]] = True
    bits = np.packbits(np.pad(allowed, (0, 24)), bitorder="little").view(np.uint32)
    by_bools, by_bits = sampler(**params), sampler(**params)
    tokens = [by_bools.sample(WholeRow(logits), i, allowed).token for i in range(40)]
    assert set(tokens) <= {3, 64, 999}
    assert [by_bits.sample(WholeRow(logits), i, bits).token for i in range(40)] == tokens
    with pytest.raises(NoTokenLeft, match="forbid"):
        by_bools.sample(WholeRow(logits), 40, np.zeros(N_VOCAB, dtype=np.bool_))


def test_penalties_see_the_prompt_and_what_was_drawn() -> None:
    logits = np.zeros(4, dtype=np.float32)
    logits[:] = [3.0, 2.9, 2.8, 2.7]
    one = sampler((0,), n_vocab=4, temperature=0, presence_penalty=1.0)
    assert [one.sample(WholeRow(logits), i).token for i in range(4)] == [1, 2, 3, 0]
    none = sampler((0,), n_vocab=4, temperature=0, presence_penalty=1.0, repeat_last_n=0)
    assert [none.sample(WholeRow(logits), i).token for i in range(2)] == [0, 0]


def test_dry_breaks_a_loop() -> None:
    logits = np.array([1.0, 0.9, 0.8], dtype=np.float32)
    text = (0, 1, 2, 0, 1)
    assert sampler(text, n_vocab=3, temperature=0, logit_bias={2: 1.0}).sample(WholeRow(logits), 5).token == 2
    one = sampler(text, n_vocab=3, temperature=0, logit_bias={2: 1.0}, dry_multiplier=5.0)
    assert one.sample(WholeRow(logits), 5).token == 0


def test_the_given_logits_stay_as_they_are() -> None:
    logits = logits_of()
    before = logits.copy()
    one = sampler(logit_bias={1: 5.0}, repeat_penalty=1.2, dry_multiplier=1.0, ignore_eos=True)
    one.sample(WholeRow(logits), 1, np.ones(N_VOCAB, dtype=np.bool_))
    assert (logits == before).all()


def test_nan_is_an_error_not_a_token() -> None:
    logits = logits_of()
    logits[500] = np.nan
    for params in ({"temperature": 0}, PLAIN, {}):
        with pytest.raises(DeviceError, match="NaN"):
            sampler(**params).sample(WholeRow(logits), 1)
