"""Repetition, presence and frequency penalties and DRY against plain re-tellings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.request import SamplingParams
from app.engine.rows import WholeRow
from app.engine.serving.penalties import Dry, History, RecentCounts, find_breakers

N_VOCAB = 8
tokens = st.integers(0, 3)
tails = st.lists(tokens, max_size=2).map(tuple)
texts = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40)
LOGITS = np.array([2.0, -1.0, 0.0, 3.5, -2.0, 1.0, 0.5, -0.25], dtype=np.float32)


@settings(max_examples=100, deadline=None)
@given(prompt=texts, more=st.lists(st.integers(0, N_VOCAB - 1), max_size=80), n_last=st.sampled_from([-1, 1, 3, 64]))
def test_penalties_count_the_last_tokens_of_prompt_and_answer(prompt: list[int], more: list[int], n_last: int) -> None:
    history = History(prompt)
    counts = RecentCounts(history, n_last)
    for token in more:
        history.push(token)
        counts.push(history)
    params = SamplingParams(repeat_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.125, repeat_last_n=n_last)
    logits = LOGITS.copy()
    counts.penalize(logits, WholeRow(logits).places, params)
    window = [*prompt, *more][-n_last if n_last > 0 else 0 :]
    for token in range(N_VOCAB):
        want = float(LOGITS[token])
        if token in window:
            want = want / 1.5 if want > 0 else want * 1.5
            want -= 0.25 + 0.125 * window.count(token)
        assert logits[token] == pytest.approx(want, abs=1e-6)


def reference_dry(text: list[int], params: SamplingParams, breakers: dict[int, list[tuple[int, ...]]]) -> list[float]:
    """For every token: how long a repetition of the text's end would it go on with? Then the penalty for that."""
    window = text if params.dry_penalty_last_n < 0 else text[-params.dry_penalty_last_n :]
    limit = len(window)
    for i in range(len(window) - 1, -1, -1):  # the last breaker's head, and as much of it as fits
        fits = [len(t) for t in breakers.get(window[i], []) if tuple(window[i + 1 : i + 1 + len(t)]) == t]
        if fits:
            limit = len(window) - 1 - i - max(fits)
            break
    penalties = [0.0] * N_VOCAB
    for i in range(len(window) - 1):
        n = 0
        while n <= i and n < limit and window[i - n] == window[-1 - n]:
            n += 1
        token = window[i + 1]
        if n >= max(1, params.dry_allowed_length) and () not in breakers.get(token, []):
            penalty = params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length)
            penalties[token] = max(penalties[token], penalty)
    return penalties


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(tokens, min_size=1, max_size=60),
    allowed=st.integers(1, 4),
    n_last=st.sampled_from([-1, 5, 20]),
    breakers=st.dictionaries(
        tokens, st.lists(st.lists(tokens, max_size=2).map(tuple), min_size=1, max_size=2), max_size=2
    ),
)
def test_dry(text: list[int], allowed: int, n_last: int, breakers: dict[int, list[tuple[int, ...]]]) -> None:
    params = SamplingParams(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=allowed, dry_penalty_last_n=n_last)
    logits = LOGITS.copy()
    Dry(params, breakers, N_VOCAB).penalize(logits, History(text))
    assert (LOGITS - logits).tolist() == pytest.approx(reference_dry(text, params, breakers), rel=1e-5, abs=1e-5)


def test_dry_of_a_text_that_repeats_one_token_for_ever_is_finite() -> None:
    params = SamplingParams(dry_multiplier=0.8)
    logits = LOGITS.copy()
    Dry(params, {}, N_VOCAB).penalize(logits, History([1] * 5000))
    assert np.isfinite(logits).all() and logits[1] < -1e30
    assert logits[[0, 2, 3, 4, 5, 6, 7]].tolist() == LOGITS[[0, 2, 3, 4, 5, 6, 7]].tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(dry_multiplier=1e308),
        SamplingParams(dry_multiplier=1e300, dry_base=1e308, dry_allowed_length=0),
        SamplingParams(dry_multiplier=5.0, dry_base=1.75, dry_allowed_length=0),
        SamplingParams(repeat_penalty=0.01, presence_penalty=-2.0, frequency_penalty=-2.0),
        SamplingParams(repeat_penalty=100.0, presence_penalty=2.0, frequency_penalty=2.0),
    ],
)
def test_the_strongest_penalties_leave_finite_numbers(params: SamplingParams) -> None:
    logits, history = LOGITS.copy(), History([1] * 400)
    RecentCounts(history, -1).penalize(logits, WholeRow(logits).places, params)
    Dry(params, {}, N_VOCAB).penalize(logits, history)
    assert np.isfinite(logits).all() and logits[1] != LOGITS[1]


def test_breakers_are_found_in_tokens_and_across_them() -> None:
    pieces = [b"a", b":", b"x: y", b"\n", b"a<", b"b", b"<e", b"<end>", b"nd>"]
    found = find_breakers([":", "<end>", ""], pieces, lambda text: [8] if text == b"nd>" else [99, len(text)])
    assert found == {1: ((),), 2: ((),), 4: ((99, 4),), 6: ((8,),), 7: ((),)}


@settings(max_examples=100, deadline=None)
@given(
    breakers=st.lists(st.text("ab<", max_size=4), max_size=4),
    pieces=st.lists(st.text("ab<", max_size=5).map(str.encode), max_size=12),
)
def test_breakers_are_those_of_the_definition(breakers: list[str], pieces: list[bytes]) -> None:
    def ways(piece: bytes, breaker: bytes) -> set[tuple[int, ...]]:
        if breaker in piece:
            return {()}
        return {tuple(breaker[n:]) for n in range(1, len(breaker)) if piece.endswith(breaker[:n])}

    expected = [set().union(*(ways(piece, text.encode()) for text in breakers if text)) for piece in pieces]
    found = find_breakers(breakers, pieces, list)
    assert [set(found.get(token, ())) for token in range(len(pieces))] == expected


def test_a_breaker_is_encoded_only_where_a_token_begins_it() -> None:
    encoded: list[bytes] = []

    def encode(text: bytes) -> list[int]:
        encoded.append(text)
        return [0]

    find_breakers(["x" + "y" * 60] * 16, [b"x", b"axy", b"b"] * 1000, encode)
    assert encoded == [b"y" * 60, b"y" * 59]
