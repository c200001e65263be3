"""Our packed types against ggml's reference functions in C: decoders and encoders, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from app.engine.ggml import TRAITS, GGMLType
from app.engine.gguf.quants import DECODERS, ENCODERS, dequantize, quantize
from tests.fakes.gguf import random_rows
from tests.interop.ggml_base import ggml_base

pytestmark = pytest.mark.interop

PLAIN = {GGMLType.F32, GGMLType.F16, GGMLType.BF16}


def c_name(type_: GGMLType) -> str:
    name = type_.name.lower()
    return name.replace("_k", "_K") if type_.name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K") else name


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("type_", sorted(set(DECODERS) - PLAIN), ids=lambda t: t.name)
def test_decoder(type_: GGMLType) -> None:
    n = 40 * TRAITS[type_].block_elements
    raw = random_rows(type_, 1, n, np.random.default_rng(type_))
    want = np.empty((1, n), np.float32)
    getattr(ggml_base(), f"dequantize_row_{c_name(type_)}")(pointer(raw), pointer(want), ctypes.c_int64(n))
    assert np.array_equal(dequantize(type_, raw).view(np.uint32), want.view(np.uint32))


def awkward_values(n: int) -> np.ndarray:
    """Blocks of 32 at many scales, on coarse grids (ties, equal extremes), of zeros, and of one sign."""
    rng = np.random.default_rng(11)
    values = rng.standard_normal((n // 32, 32)) * 10.0 ** rng.integers(-6, 4, (n // 32, 1))
    values[::3] = np.round(rng.standard_normal((len(values[::3]), 32)) * 4) / 4
    values[::7] = 0
    values[1::11] = np.abs(values[1::11])
    return values.astype(np.float32).reshape(1, n)


@pytest.mark.parametrize("type_", sorted(set(ENCODERS) - PLAIN), ids=lambda t: t.name)
def test_encoder(type_: GGMLType) -> None:
    values = awkward_values(32 * 500)
    want = np.zeros((1, 500 * TRAITS[type_].block_bytes), np.uint8)
    encode = getattr(ggml_base(), f"quantize_row_{c_name(type_)}_ref")
    encode(pointer(values), pointer(want), ctypes.c_int64(values.size))
    got = quantize(type_, values)
    if type_ is GGMLType.IQ4_NL:  # the codes of a block of zeros are left to chance there
        alive = np.abs(values.reshape(-1, 32)).max(axis=1) > 1e-15
        got, want = got.reshape(-1, 18)[alive], want.reshape(-1, 18)[alive]
    assert np.array_equal(got, want)


@pytest.mark.parametrize(("type_", "name"), [(GGMLType.BF16, "bf16"), (GGMLType.F16, "fp16")])
def test_half_floats(type_: GGMLType, name: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 1 << 32, (1, 20000), dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)].reshape(1, -1)
    want = np.empty(values.size, np.uint16)
    encode = getattr(ggml_base(), f"ggml_fp32_to_{name}_row")
    encode(pointer(values), pointer(want), ctypes.c_int64(values.size))
    assert np.array_equal(quantize(type_, values).view(np.uint16)[0], want)
