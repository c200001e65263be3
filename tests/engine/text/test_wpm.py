from __future__ import annotations

import time

from app.engine.text.special_ids import TokenType
from app.engine.text.tokenizer import Tokenizer
from tests.engine.text.vocabularies import vocabulary

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["▁un", "aff", "able", "▁hello", "▁,", "▁!", "▁caf", "e", "▁世", "▁界", "▁$", "▁1", "2", "▁x"]
KINDS = dict.fromkeys(SPECIAL, TokenType.CONTROL) | {"[UNK]": TokenType.UNKNOWN}


def made_up(**keys: object) -> Tokenizer:
    ids = {"cls": 2, "padding": 0, "unknown": 1, "bos": 2, "seperator": 3, "mask": 4}
    given: dict[str, object] = {f"{name}_token_id": token for name, token in ids.items()} | keys
    return Tokenizer.from_metadata(vocabulary("bert", [*SPECIAL, *WORDS], KINDS, **given))


def texts(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[str]:
    tokens = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    return [tokenizer.token_text(token) for token in tokens]


def test_words_are_spelled_by_the_longest_tokens() -> None:
    assert texts(made_up(), "unaffable hello") == ["▁un", "aff", "able", "▁hello"]


def test_a_word_that_cannot_be_spelled_is_unknown_as_a_whole() -> None:
    assert texts(made_up(), "unaffably x") == ["[UNK]", "▁x"]


def test_marks_symbols_and_ideographs_are_words() -> None:
    assert texts(made_up(), "hello,世界!$12") == ["▁hello", "▁,", "▁世", "▁界", "▁!", "▁$", "▁1", "2"]


def test_case_and_accents_go_unless_the_file_says_otherwise() -> None:
    assert texts(made_up(), "HELLO Café") == ["▁hello", "▁caf", "e"]
    keep = made_up(**{"normalizer.lowercase": False, "normalizer.strip_accents": False})
    assert texts(keep, "hello HELLO café") == ["▁hello", "[UNK]", "[UNK]"]


def test_control_characters_vanish() -> None:
    assert texts(made_up(), "he\0l\x07lo\ufffd\tx") == ["▁hello", "▁x"]


def test_a_separator_always_closes_and_the_mask_eats_the_space_before_it() -> None:
    tokenizer = made_up()
    tokens = tokenizer.encode("x [MASK] x", add_special=True, parse_special=True)
    assert [tokenizer.token_text(token) for token in tokens] == ["[CLS]", "▁x", "[MASK]", "▁x", "[SEP]"]
    assert tokenizer.encode("", add_special=True, parse_special=True) == [2, 3]


def test_decoding_puts_spaces_back() -> None:
    tokenizer = made_up()
    tokens = tokenizer.encode("unaffable hello", add_special=True, parse_special=False)
    assert tokenizer.decode(tokens[1:-1]) == "unaffable hello"


def test_a_word_without_end_costs_in_proportion_to_its_length() -> None:
    start = time.process_time()
    made_up().encode("un" + "aff" * 100_000, add_special=False, parse_special=False)
    assert time.process_time() - start < 3.0
