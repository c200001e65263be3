"""Decoders against an independent implementation, bit for bit; encoders likewise."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.ggml import TRAITS, GGMLType, row_bytes
from app.engine.gguf.quants import DECODERS, ENCODERS, dequantize, quantize
from app.engine.gguf.reader import GGUFFile
from tests.support import goldens_dir

#: Types the independent implementation does not know; they have tests of their own.
WITHOUT_ORACLE = {GGMLType.Q1_0, GGMLType.Q2_0}
FILE_TYPES = sorted(set(DECODERS) - WITHOUT_ORACLE)
IN_FILES = [t for t in GGMLType if t not in (GGMLType.Q8_1, GGMLType.Q8_K)]


def random_rows(type_: GGMLType, n_rows: int, n_blocks: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n_rows, n_blocks * TRAITS[type_].block_bytes), dtype=np.uint8)


def bits_of(values: np.ndarray) -> np.ndarray:
    """Bit patterns; every NaN counts as the same."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), np.ascontiguousarray(values).view(np.uint32))


def expected(type_: GGMLType, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if type_ is GGMLType.F32:
            return raw.view("<f4")
        return oracle.dequantize(raw, GGMLQuantizationType(type_)).astype(np.float32)


def test_every_type_of_model_files_has_a_decoder() -> None:
    numbers = {t for t in IN_FILES if t not in (GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64, GGMLType.F64)}
    assert set(DECODERS) == numbers


@pytest.mark.parametrize("type_", FILE_TYPES, ids=lambda t: t.name)
def test_random_blocks_decode_to_the_same_bits(type_: GGMLType) -> None:
    raw = random_rows(type_, 37, 3, seed=type_)
    with np.errstate(all="ignore"):
        got = dequantize(type_, raw)
    assert np.array_equal(bits_of(got), bits_of(expected(type_, raw)))


@pytest.mark.parametrize("type_", sorted(DECODERS), ids=lambda t: t.name)
def test_strided_rows_and_a_given_array(type_: GGMLType) -> None:
    raw = random_rows(type_, 8, 2, seed=1)
    wide = np.zeros((16, raw.shape[1] + 5), np.uint8)
    wide[::2, :-5] = raw
    big = np.full((8, 2 * TRAITS[type_].block_elements + 3), 7, np.float32)
    with np.errstate(all="ignore"):
        plain = dequantize(type_, raw)
        given_array = dequantize(type_, wide[::2, :-5], big[:, :-3])
    assert np.shares_memory(given_array, big)
    assert np.array_equal(bits_of(given_array), bits_of(plain))
    assert np.all(big[:, -3:] == 7)


@pytest.mark.parametrize(("type_", "mask", "values"), [(GGMLType.Q1_0, 1, (-1, 1)), (GGMLType.Q2_0, 3, (-1, 0, 1, 2))])
def test_types_without_an_oracle_one_element_at_a_time(type_: GGMLType, mask: int, values: tuple[int, ...]) -> None:
    raw = random_rows(type_, 1, 2, seed=3)
    n, width = TRAITS[type_]
    raw[0, 0:2] = np.array([1.5], "<f2").view(np.uint8)
    raw[0, width : width + 2] = np.array([-0.25], "<f2").view(np.uint8)
    got = dequantize(type_, raw)[0]
    per_byte = 8 if mask == 1 else 4
    for e in range(2 * n):
        byte = int(raw[0, e // n * width + 2 + e % n // per_byte])
        code = byte >> (8 // per_byte) * (e % per_byte) & mask
        assert got[e] == (1.5, -0.25)[e // n] * values[code]


@pytest.mark.parametrize("type_", sorted({*FILE_TYPES} - {GGMLType.NVFP4}), ids=lambda t: t.name)
def test_tensors_of_golden_files(type_: GGMLType) -> None:
    folder = goldens_dir() / "models"
    found = 0
    for path in sorted(folder.glob(f"*-{type_.name}.gguf")):
        with GGUFFile.open(path) as file:
            for info in file.tensors.values():
                rows = np.frombuffer(file.data(info.name), np.uint8).reshape(-1, row_bytes(info.type, info.ne[0]))
                assert np.array_equal(dequantize(info.type, rows), expected(info.type, rows)), info.name
                found += 1
    assert found


def test_what_cannot_be_decoded_is_refused() -> None:
    with pytest.raises(ValueError, match="Q8_K cannot be read as numbers"):
        dequantize(GGMLType.Q8_K, np.zeros((1, 292), np.uint8))
    with pytest.raises(ValueError, match="multiples of 18 bytes"):
        dequantize(GGMLType.Q4_0, np.zeros((1, 19), np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize(GGMLType.Q4_0, np.zeros((1, 18), np.uint8), np.zeros((1, 31), np.float32))
    with pytest.raises(ValueError, match="Q4_K cannot be written"):
        quantize(GGMLType.Q4_K, np.zeros((1, 256), np.float32))
    with pytest.raises(ValueError, match="multiples of 32 elements"):
        quantize(GGMLType.Q8_0, np.zeros((1, 33), np.float32))


def test_no_rows_and_no_columns() -> None:
    assert dequantize(GGMLType.Q4_K, np.zeros((0, 144), np.uint8)).shape == (0, 256)
    assert dequantize(GGMLType.F16, np.zeros((3, 0), np.uint8)).shape == (3, 0)
    assert quantize(GGMLType.Q8_0, np.zeros((0, 64), np.float32)).shape == (0, 68)


EXACT = [GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1]


@pytest.mark.parametrize("type_", EXACT, ids=lambda t: t.name)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-6, 0.03, 1.0, 3e4]), grid=st.booleans())
@settings(max_examples=15, deadline=None)
def test_encoders_round_as_the_reference(type_: GGMLType, seed: int, scale: float, grid: bool) -> None:
    """Also on a coarse grid, where ties and equal extremes are common, and with an all-zero block."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((7, 96)).astype(np.float32)
    if grid:
        values = np.round(values * 4) / 4
    values = (values * np.float32(scale)).astype(np.float32)
    values[3, 32:64] = 0
    with np.errstate(over="ignore"):
        want = oracle.quantize(values, GGMLQuantizationType(type_))
    assert np.array_equal(quantize(type_, values), want.view(np.uint8).reshape(7, -1))


def test_bf16_of_nan_stays_nan_and_f16_overflows_to_infinity() -> None:
    odd = np.array([[0x7F800001, 0xFFFFFFFF, 0x7F800000, 0x7F7FFFFF]], np.uint32).view(np.float32)
    back = dequantize(GGMLType.BF16, quantize(GGMLType.BF16, odd))[0]
    assert np.isnan(back[:2]).all() and np.isposinf(back[2:]).all()
    assert np.isinf(dequantize(GGMLType.F16, quantize(GGMLType.F16, np.array([[1e6]], np.float32)))).all()


def test_iq4_nl_is_as_near_as_its_codebook_allows() -> None:
    """No oracle encodes this type. Codebook values times a half-precision scale must come back unchanged."""
    rng = np.random.default_rng(5)
    raw = random_rows(GGMLType.IQ4_NL, 16, 4, seed=5)
    blocks = raw.reshape(16, 4, 18)
    blocks[..., :2] = rng.choice(np.array([0.5, -0.25, 2.0], "<f2"), (16, 4, 1)).view(np.uint8).reshape(16, 4, 2)
    blocks[..., 2] = 0  # the largest magnitude must occur, or a block is not the best code of itself
    exact = dequantize(GGMLType.IQ4_NL, raw)
    assert np.array_equal(dequantize(GGMLType.IQ4_NL, quantize(GGMLType.IQ4_NL, exact)), exact)
    noisy = rng.standard_normal((64, 64)).astype(np.float32)
    error = dequantize(GGMLType.IQ4_NL, quantize(GGMLType.IQ4_NL, noisy)) - noisy
    assert np.sqrt(np.mean(error**2)) < 0.08
    assert not dequantize(GGMLType.IQ4_NL, quantize(GGMLType.IQ4_NL, np.zeros((1, 32), np.float32))).any()


def test_every_cache_type_has_an_encoder() -> None:
    assert set(ENCODERS) >= {*EXACT, GGMLType.F32, GGMLType.IQ4_NL}
