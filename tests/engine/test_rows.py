"""What comes back of rows of logits: records of the best tokens lead to what the whole rows would have led to."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.engine.request import SamplingParams
from app.engine.rows import MAX_BEST, WHOLE, BestRow, RowSelection, RowWish, WholeRow, selection_of
from app.engine.serving.sampler import Sampler
from app.errors import DeviceError
from tests.fakes.crowd import alone, crowd, keeping_rows, serving
from tests.fakes.gguf import TinyLlama, write_tiny_llama

N_VOCAB = 5000
EOG = (5, 6)


def record_of(logits: NDArray[np.float32], wish: RowWish) -> BestRow:
    selection = RowSelection(len(logits), (wish,))
    (row,) = selection.rows(selection.select(logits.data.cast("B")))
    assert isinstance(row, BestRow)
    return row


params = st.builds(
    SamplingParams,
    seed=st.integers(0, 1 << 20),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([1, 2, 40, 300]),
    top_p=st.sampled_from([1.0, 0.0, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    typical_p=st.sampled_from([1.0, 0.5]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    min_keep=st.sampled_from([0, 3, 100]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    repeat_last_n=st.sampled_from([0, 7, 64, -1]),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, N_VOCAB - 1), st.sampled_from([-1.0, -np.inf]), max_size=3),
    n_logprobs=st.sampled_from([None, None, 0, 5, 20]),
)


@settings(max_examples=300, deadline=None)
@given(
    params=params,
    seed=st.integers(0, 1 << 20),
    width=st.sampled_from([0.0, 1e-38, 1e-6, 0.3, 3.0]),
    n_values=st.sampled_from([0, 9, 90]),
)
def test_a_record_leads_to_what_the_row_leads_to(
    params: SamplingParams, seed: int, width: float, n_values: int
) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, N_VOCAB, 30).tolist()
    from_rows, from_records = (Sampler(params, prompt, n_vocab=N_VOCAB, eog=EOG) for _ in range(2))
    for position in range(8):
        logits = rng.normal(0, width, N_VOCAB).astype(np.float32)
        if n_values:
            logits = rng.choice(logits[:n_values], N_VOCAB)
        logits[rng.integers(N_VOCAB)] += rng.choice([0.0, 10.0])  # distances from it are rounded
        wish = from_records.wish()
        assert 0 < wish.n_best <= MAX_BEST
        drawn = from_records.sample(record_of(logits, wish), position)
        assert drawn == from_rows.sample(WholeRow(logits), position)


@settings(max_examples=200, deadline=None)
@given(
    params=params,
    seed=st.integers(0, 1 << 20),
    width=st.sampled_from([1e-6, 0.3, 3.0]),
    n_values=st.sampled_from([0, 9]),
    n_prompt=st.sampled_from([1, 6, 7, 30]),
)
def test_what_is_wished_for_a_token_ahead_leads_to_what_the_row_leads_to(
    params: SamplingParams, seed: int, width: float, n_values: int, n_prompt: int
) -> None:
    """The best of every row are tokens that penalties push down, the one just drawn among them."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 40, n_prompt).tolist()
    from_rows, from_records = (Sampler(params, prompt, n_vocab=N_VOCAB, eog=EOG) for _ in range(2))
    wish, last = from_records.wish(), prompt[0]
    for position in range(8):
        logits = rng.normal(0, width, N_VOCAB).astype(np.float32)
        if n_values:
            logits = rng.choice(logits[:n_values], N_VOCAB)
        logits[:40] += np.float32(4 * width)
        logits[last] += np.float32(width)
        ahead = from_records.wish(1)
        drawn = from_records.sample(record_of(logits, wish), position)
        assert drawn == from_rows.sample(WholeRow(logits), position)
        wish, last = ahead, drawn.token


def test_a_token_ahead_may_be_one_more_that_penalties_push_down() -> None:
    def n_best(n_ahead: int, **fields: object) -> int:
        sampling = SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]
        return Sampler(sampling, (1, 2, 3), n_vocab=N_VOCAB, eog=EOG).wish(n_ahead).n_best

    assert [n_best(n) for n in (0, 1)] == [1, 1]
    assert [n_best(n, logit_bias={9: -1.0}) for n in (0, 1)] == [2, 2]
    assert [n_best(n, repeat_penalty=1.1) for n in (0, 1, 2)] == [4, 5, 6]
    assert n_best(1, repeat_penalty=1.1, n_logprobs=MAX_BEST - 4) == MAX_BEST
    assert n_best(1, repeat_penalty=1.1, n_logprobs=MAX_BEST - 3) == WHOLE.n_best
    assert n_best(0, repeat_penalty=1.1, n_logprobs=MAX_BEST - 3) == MAX_BEST


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 0},
        {"mirostat": 2},
        {"dry_multiplier": 0.8},
        {"logit_bias": {7: 0.1}},
        {"repeat_penalty": 0.9},
        {"presence_penalty": -0.1},
        {"frequency_penalty": -0.1},
        {"top_k": MAX_BEST + 1},
        {"repeat_penalty": 1.1, "top_k": MAX_BEST},
    ],
    ids=str,
)
def test_whole_rows_are_wished_for_where_any_token_may_count(params: dict[str, object]) -> None:
    sampler = Sampler(SamplingParams(**params), (1, 2, 3), n_vocab=N_VOCAB, eog=EOG)  # type: ignore[arg-type]
    assert sampler.wish() == sampler.wish(1) == WHOLE


def test_what_is_broken_is_seen_in_a_record_as_in_a_row() -> None:
    for value in (np.nan, np.inf):
        logits = np.zeros(N_VOCAB, np.float32)
        logits[4000] = value
        sampler = Sampler(SamplingParams(temperature=0.0), (), n_vocab=N_VOCAB)
        with pytest.raises(DeviceError, match="NaN or infinity"):
            sampler.sample(record_of(logits, sampler.wish()), 0)


def test_what_a_device_makes_up_is_refused() -> None:
    rows = RowSelection(101, (RowWish(2, True),))
    with pytest.raises(DeviceError, match="not 2 rising ones of 101"):
        rows.rows(memoryview(record(1 << 40, (3, 101))))
    for tokens in ((3, 3), (4, 3)):
        with pytest.raises(DeviceError, match="not 2 rising ones"):
            rows.rows(memoryview(record(1 << 40, tokens)))
    (row,) = rows.rows(memoryview(record(17, (3, 100))))
    with pytest.raises(DeviceError, match="a weight of 17"):
        row.log_total()


def record(total: int, tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<Q{len(tokens)}I", total, *tokens) + bytes(4 * len(tokens))


def test_records_and_whole_rows_travel_together() -> None:
    table = np.random.default_rng(1).normal(0, 1, (3, 101)).astype(np.float32)
    selection = RowSelection(101, (RowWish(3, True), WHOLE, RowWish(1, False)))
    again = RowSelection.unpack(101, memoryview(selection.packed))
    assert again == selection
    selected = selection.select(table.data.cast("B"))
    assert len(selected) == selection.n_bytes == (8 + 3 * 8) + 404 + (8 + 8)
    best, whole, one = selection.rows(selected)
    assert isinstance(best, BestRow) and best.tokens.tolist() == sorted(np.argsort(-table[0])[:3].tolist())
    assert best.log_total() == WholeRow(table[0]).log_total()
    assert whole.values.tolist() == table[1].tolist()
    assert one.token(0) == int(table[2].argmax())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    n=st.sampled_from([1, 2, 63, 64, 65, 1025, 9000]),
    width=st.sampled_from([0.0, 3.0, 300.0]),
    n_values=st.sampled_from([0, 7]),
    n_rows=st.integers(0, 4),
    has_nan=st.booleans(),
)
def test_native_code_and_numpy_select_the_same_bytes(
    seed: int, n: int, width: float, n_values: int, n_rows: int, has_nan: bool
) -> None:
    rng = np.random.default_rng(seed)
    table = rng.normal(0, width, (n_rows, n)).astype(np.float32)
    if n_values and n_rows:
        table = rng.choice(table[0, :n_values], (n_rows, n))
    table[:, rng.integers(n)] = -np.inf
    if has_nan:
        table[:, rng.integers(n)] = np.nan
    counts = rng.choice([0, 1, min(n, 40), min(n, MAX_BEST)], n_rows)
    rows = RowSelection(n, tuple(RowWish(int(count), bool(rng.integers(2))) for count in counts))
    source = table.data.cast("B") if table.size else memoryview(b"")
    plain = memoryview(bytearray(rows.n_bytes))
    rows.select_numpy(source, plain)
    selected = rows.select(source)
    assert has_nan or selected == plain
    for one, row in zip(rows.rows(selected), table, strict=True):
        if isinstance(one, BestRow):
            assert np.isnan(one.values).all() if has_nan else one.values.tolist() == row[one.tokens].tolist()


def test_rows_hardly_longer_than_their_records_stay_whole() -> None:
    assert selection_of([RowWish(40, False), WHOLE], 160) is None
    assert selection_of([RowWish(40, False), RowWish(2, False)], 100) == RowSelection(100, (WHOLE, RowWish(2, False)))
    assert selection_of([], 1000) is None


def test_an_engine_answers_the_same_from_records_and_from_whole_rows(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama())
    wanted = crowd()
    with serving(model) as engine:
        from_records = alone(engine, wanted)
    with serving(model, keeping_rows) as engine:
        assert alone(engine, wanted) == from_records
