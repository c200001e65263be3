from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.text.detokenizer import Detokenizer
from app.engine.text.tokenizer import Tokenizer
from tests.engine.text.vocabularies import TINY, tiny, vocabulary


@pytest.fixture
def byte_tokens() -> Tokenizer:
    """A vocabulary of single bytes and a few words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁"]
    scores = [0.0] * len(tokens)
    return Tokenizer.from_metadata(
        vocabulary("llama", tokens, scores=scores, token_type=[2, 3, 3, *[6] * 256, 1, 1, 1])
    )


def ids_of(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def texts(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [detokenizer.push(token) for token in tokens]


def test_a_character_comes_out_with_its_last_byte(byte_tokens: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokens)
    assert texts(detokenizer, ids_of("é🦙x".encode())) == ["", "é", "", "", "", "🦙", "x"]
    assert detokenizer.flush() == ""


def test_bytes_become_a_replacement_as_soon_as_nothing_can_complete_them(byte_tokens: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokens)
    assert texts(detokenizer, ids_of(b"\xf0\x9fA")) == ["", "", "\ufffdA"]
    assert texts(detokenizer, ids_of(b"\x80\xff")) == ["\ufffd", "\ufffd"]
    assert texts(detokenizer, ids_of(b"\xe4\xbd\xe4\xbd\xa0")) == ["", "", "\ufffd", "", "你"]


def test_a_character_that_never_ends_is_one_replacement(byte_tokens: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokens)
    assert texts(detokenizer, ids_of("🦙".encode()[:3])) == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_the_first_space_stays_behind_a_prompt_and_goes_at_a_beginning(byte_tokens: Tokenizer) -> None:
    a = byte_tokens.token_id("▁a")
    assert a is not None
    assert texts(Detokenizer(byte_tokens), [a, a]) == [" a", " a"]
    assert texts(Detokenizer(byte_tokens, drop_first_space=True), [a, a]) == ["a", " a"]


def test_control_tokens_are_silent_unless_shown(byte_tokens: Tokenizer) -> None:
    assert texts(Detokenizer(byte_tokens), [1, 2]) == ["", ""]
    assert texts(Detokenizer(byte_tokens, show_special=True), [1, 2]) == ["<s>", "</s>"]


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=40)
@given(data=st.data())
def test_streaming_equals_decoding_all_pieces_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = tiny(name)
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer, show_special=True)
    streamed = "".join(texts(detokenizer, tokens)) + detokenizer.flush()
    whole = b"".join(tokenizer.piece(token, show_special=True) for token in tokens)
    assert streamed == whole.decode("utf-8", "replace")


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=40)
@given(text=st.text(max_size=40))
def test_text_survives_tokens_and_streaming(name: str, text: str) -> None:
    tokenizer = tiny(name)
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    detokenizer = Detokenizer(tokenizer, drop_first_space=True)
    assert "".join(texts(detokenizer, tokens)) + detokenizer.flush() == text
