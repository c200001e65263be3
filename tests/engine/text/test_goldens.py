"""Every golden string, vocabulary and token piece of an independent engine."""

from __future__ import annotations

import hashlib

import pytest

from tests.engine.text.vocabularies import GOLDENS, golden, tokenizer_of

#: Input that is no UTF-8 in ways the reference reads leniently: an overlong slash, and a pair of surrogates.
#: Reading these would let one text hide behind another's bytes, so they count as one U+FFFD per byte here.
STRICTER = {"overlong": b"\xc0\xaf x", "surrogate": b"\xed\xa0\x80\xed\xb0\x80"}


@pytest.mark.parametrize("name", GOLDENS)
def test_every_string_has_the_golden_tokens(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in golden(name)["texts"]:
        if text["name"] in STRICTER and tokenizer.vocabulary.model == "gpt2":
            continue
        for add in (0, 1):
            for parse in (0, 1):
                got = tokenizer.encode(
                    bytes.fromhex(text["utf8_hex"]), add_special=bool(add), parse_special=bool(parse)
                )
                assert got == text[f"ids_add{add}_parse{parse}"], (text["name"], add, parse)


@pytest.mark.parametrize("name", GOLDENS)
def test_text_and_its_bytes_are_the_same_input(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in golden(name)["texts"]:
        if "text" in text:
            got = tokenizer.encode(text["text"], add_special=True, parse_special=True)
            assert got == text["ids_add1_parse1"], text["name"]


@pytest.mark.parametrize("name", GOLDENS)
def test_bytes_that_are_no_utf8_become_replacement_characters_or_byte_tokens(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for data in STRICTER.values():
        back = tokenizer.decode_bytes(tokenizer.encode(data, add_special=False, parse_special=False))
        if tokenizer.vocabulary.model == "llama":
            assert back == data
        else:
            expected = "".join("\ufffd" if byte >= 0x80 else chr(byte) for byte in data)
            assert back.decode() == expected


@pytest.mark.parametrize("name", GOLDENS)
def test_decoding_gives_the_golden_bytes(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in golden(name)["texts"]:
        for parse in (0, 1):
            got = tokenizer.decode_bytes(text[f"ids_add0_parse{parse}"], show_special=True)
            assert got.hex() == text[f"back_hex_parse{parse}"], text["name"]


@pytest.mark.parametrize("name", GOLDENS)
def test_the_vocabulary_is_the_golden_one(name: str) -> None:
    tokenizer = tokenizer_of(name)
    vocab = golden(name)["vocab"]
    assert tokenizer.vocab_size == vocab["n_vocab"]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (vocab["bos"], vocab["eos"], vocab["add_bos"])
    assert sorted(tokenizer.eog) == vocab["end_of_generation"]
    for sample in vocab["samples"]:
        shown = tokenizer.piece(sample["id"], show_special=True)
        hidden = tokenizer.piece(sample["id"], show_special=False)
        assert (shown.hex(), hidden.hex()) == (sample["shown_hex"], sample["hidden_hex"]), sample
    assert _hash_of_pieces(name, True) == vocab["sha256_special_shown"]
    assert _hash_of_pieces(name, False) == vocab["sha256_special_hidden"]


def _hash_of_pieces(name: str, show_special: bool) -> str:
    tokenizer = tokenizer_of(name)
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token, show_special=show_special)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()
