"""Damaged conversations: whatever a client says, the worker refuses it or does it, and never fails itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.rpc import messages as m
from app.rpc.protocol import encode
from app.rpc.token import Token
from app.rpc.wire import MAX_ERROR_NOTICE_BYTES
from tests.rpc.fuzz_worker import CORPUS, VERSION, device, one_input, seeds

SEEDS = list(seeds())


@pytest.fixture(scope="module", autouse=True)
def closed_device() -> Iterator[None]:
    yield
    device().close()
    device.cache_clear()


@pytest.mark.parametrize("number", range(len(SEEDS)))
@pytest.mark.parametrize("piece_bytes", [1, 1 << 16])
def test_a_sensible_client_is_served_to_its_last_word(number: int, piece_bytes: int) -> None:
    script = one_input(SEEDS[number], piece_bytes)
    assert script.recv(1) == b""
    assert script.answered_bytes >= 36 + 24 + 16 + 72  # the last answer is among them


def test_what_a_hunt_has_found_stays_harmless() -> None:
    files = sorted(path for path in CORPUS.iterdir() if path.is_file()) if CORPUS.is_dir() else []
    for path in files:
        one_input(Path(path).read_bytes())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A seed with bytes changed, cut out, doubled, or spliced with another."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            data[at : at + 4] = draw(st.sampled_from([b"\xff" * 4, bytes(4), b"\x01\0\0\0", b"\0\0\0\x80"]))
        elif kind == 2:
            del data[at : at + draw(st.integers(1, 16))]
        elif kind == 3:
            data[at:at] = data[at : at + draw(st.sampled_from([1, 9, 296]))]
        else:
            data = data[:at] + draw(st.sampled_from(SEEDS))[draw(st.integers(0, 4000)) :]
        if not data:
            break
    return bytes(data)


@settings(max_examples=250, deadline=None)
@given(damaged())
def test_damaged_conversations(data: bytes) -> None:
    one_input(data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600))
def test_noise(data: bytes) -> None:
    one_input(data)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(damaged(), st.binary(max_size=600).map(lambda proof: encode(m.AuthChallenge(bytes(32)), VERSION) + proof))
)
def test_whatever_strangers_say_they_get_nothing(data: bytes) -> None:
    script = one_input(data, token=Token(b"a token that nobody here has"))
    refusal = 8 + 4 + MAX_ERROR_NOTICE_BYTES
    assert script.answered_bytes <= 36 + 41 + refusal  # HELLO and one challenge
