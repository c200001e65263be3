"""FNV-1a 64: the published vectors, both implementations, and what callers lean on."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.kernels import hash as hashing

needs_native = pytest.mark.skipif(not hashing.NATIVE, reason="built without native modules")

#: From the appendix of the FNV draft: input, FNV-1a 64.
VECTORS = [
    (b"", 0xCBF29CE484222325),
    (b"a", 0xAF63DC4C8601EC8C),
    (b"b", 0xAF63DF4C8601F1A5),
    (b"fo", 0x08985907B541D342),
    (b"foo", 0xDCB27518FED9D577),
    (b"foob", 0xDD120E790C2512AF),
    (b"fooba", 0xCAC165AFA2FEF40A),
    (b"foobar", 0x85944171F73967E8),
    (b"\x00", 0xAF63BD4C8601B7DF),
]


def reference(data: bytes, previous: int = hashing.OFFSET_BASIS) -> int:
    """The definition, one byte at a time."""
    for byte in data:
        previous = ((previous ^ byte) * hashing.PRIME) % (1 << 64)
    return previous


@pytest.mark.parametrize(("data", "expected"), VECTORS)
@pytest.mark.parametrize("function", [hashing.fnv1a64, hashing.fnv1a64_numpy])
def test_published_vectors(function, data: bytes, expected: int) -> None:
    assert function(data) == expected


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, (1 << 64) - 1))
def test_both_forms_follow_the_definition(data: bytes, previous: int) -> None:
    assert hashing.fnv1a64(data, previous) == reference(data, previous)
    assert hashing.fnv1a64_numpy(data, previous) == reference(data, previous)


@pytest.mark.parametrize("function", [hashing.fnv1a64, hashing.fnv1a64_numpy])
@pytest.mark.parametrize("cut", [0, 1, 65535, 65536, 65537, 150_000])
def test_continuing_equals_hashing_at_once(function, cut: int) -> None:
    data = np.random.default_rng(7).bytes(150_000)
    assert function(data[cut:], function(data[:cut])) == reference(data)


@pytest.mark.parametrize("function", [hashing.fnv1a64, hashing.fnv1a64_numpy])
def test_any_contiguous_buffer_is_its_bytes(function) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = reference(array.tobytes())
    for buffer in (array, array.tobytes(), bytearray(array.tobytes()), memoryview(array)):
        assert function(buffer) == expected


@pytest.mark.parametrize("function", [hashing.fnv1a64, hashing.fnv1a64_numpy])
def test_a_strided_buffer_is_refused(function) -> None:
    with pytest.raises((BufferError, TypeError, ValueError)):
        function(np.arange(24, dtype=np.uint8)[::2])


@needs_native
@pytest.mark.parametrize("previous", [-1, 1 << 64])
def test_a_previous_hash_is_64_bits(previous: int) -> None:
    with pytest.raises(TypeError):
        hashing.fnv1a64(b"a", previous)


@needs_native
def test_a_buffer_being_hashed_cannot_be_resized_and_the_gil_is_free() -> None:
    """While another thread hashes, this one runs, and the hasher's hold on the buffer is seen from here."""
    data = bytearray(128 << 20)
    started = threading.Event()

    def work() -> None:
        started.set()
        hashing.fnv1a64(data)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    held = False
    while thread.is_alive() and not held:
        try:
            data.append(0)
            data.pop()
        except BufferError:
            held = True
    thread.join()
    assert held
