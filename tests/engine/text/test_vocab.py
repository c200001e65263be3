from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from app.engine.text.special_ids import TokenType
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.errors import FormatError, UnsupportedModel
from tests.engine.text.vocabularies import tiny, vocabulary

CONTROL = TokenType.CONTROL


def spm(tokens: list[str], kinds: dict[str, TokenType] | None = None, **keys: Any) -> Tokenizer:
    return Tokenizer.from_metadata(vocabulary("llama", tokens, kinds, scores=[0.0] * len(tokens), **keys))


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'rwkv'.*gpt2"):
        Tokenizer.from_metadata(vocabulary("rwkv", ["a"]))
    with pytest.raises(UnsupportedModel):
        Tokenizer.from_metadata({})


def test_contradictions_are_refused() -> None:
    with pytest.raises(FormatError, match="no tokenizer.ggml.tokens"):
        Tokenizer.from_metadata({"tokenizer.ggml.model": "llama"})
    with pytest.raises(FormatError, match="1 and 3.*'b'"):
        spm(["a", "b", "c", "b"])
    with pytest.raises(FormatError, match="scores has 1 entries for 2"):
        Tokenizer.from_metadata({**vocabulary("llama", ["a", "b"]), "tokenizer.ggml.scores": [0.0]})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens", 5, "tokens holds int, expected an array of texts"),
        ("tokens", [1, 2], "tokens has entries of int, expected texts"),
        ("merges", True, "merges holds bool, expected an array of texts"),
        ("token_type", 1.5, "token_type holds float, expected an array of integers"),
        ("token_type", [1, 1.5], "token_type has entries of float, expected integers"),
        ("scores", "x", "scores holds str, expected an array of numbers"),
        ("scores", [0.0, b"x"], "scores has entries of bytes, expected numbers"),
        ("suppress_tokens", 1, "suppress_tokens holds int, expected an array of integers"),
        ("add_bos_token", "yes", "add_bos_token is 'yes', expected true or false"),
        ("add_space_prefix", [], r"add_space_prefix is \[\], expected true or false"),
    ],
)
def test_metadata_of_the_wrong_kind_is_refused_by_its_key(key: str, value: object, words: str) -> None:
    with pytest.raises(FormatError, match=rf"tokenizer\.ggml\.{words}"):
        Tokenizer.from_metadata({**vocabulary("llama", ["a", "b"]), f"tokenizer.ggml.{key}": value})


def test_token_strings_may_be_bytes_and_need_not_be_utf8() -> None:
    tokenizer = Tokenizer.from_metadata(vocabulary("llama", [b"<unk>", b"a", b"\xff", b""], scores=[0.0] * 4))
    assert tokenizer.piece(2, show_special=False) == b"\xff"
    assert tokenizer.token_text(3) == "[EMPTY_3]"


def test_missing_ids_are_the_model_s_own_and_ids_outside_the_vocabulary_are_none() -> None:
    tokenizer = spm(["<unk>", "<s>", "</s>", "a"])
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos, tokenizer.add_eos) == (1, 2, True, False)
    assert spm(["<unk>", "<s>", "</s>"], bos_token_id=77).bos is None
    assert not spm(["<unk>", "<s>", "</s>"], bos_token_id=77).add_bos


def test_families_have_their_own_defaults() -> None:
    letters = [chr(c) for c in range(0x100, 0x110)]

    def bpe(pre: str, **keys: Any) -> Tokenizer:
        return Tokenizer.from_metadata(vocabulary("gpt2", letters, pre=pre, merges=[], **keys))

    assert (bpe("qwen2").bos, bpe("qwen2").add_bos) == (11, False)
    assert bpe("llama-bpe").add_bos
    assert not bpe("llama-bpe", add_bos_token=False).add_bos
    assert bpe("glm4").bos is None
    assert bpe("glm4", bos_token_id=3).bos == 3
    assert bpe("roberta-bpe").vocabulary.adds_separator
    assert bpe("qwen2", suppress_tokens=[4, 5]).suppressed == {4, 5}


def test_everything_that_ends_an_answer_is_found_by_its_text() -> None:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "x",
    ]
    assert spm(tokens).eog == {2, 3, 4, 5, 6, 7}
    assert spm(tokens).piece(3, show_special=False) == b""


def test_fill_in_the_middle_is_found_by_key_old_key_and_text() -> None:
    tokens = ["<unk>", "<s>", "</s>", "<PRE>", "<SUF>", "<MID>", "p", "s"]
    assert spm(tokens).fim.prefix == 3
    keyed = spm(tokens, fim_pre_token_id=6, suffix_token_id=7).fim
    assert (keyed.prefix, keyed.suffix, keyed.middle) == (6, 7, 5)


def test_the_end_of_a_harmony_message_does_not_end_the_answer_and_shows() -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    tokenizer = spm(tokens, dict.fromkeys(tokens[3:], CONTROL))
    assert tokenizer.eog == {2, 4, 5}
    assert tokenizer.decode([3, 4, 6]) == "<|end|><|channel|>"
    assert spm(tokens[:5]).eog == {2, 3, 4}


def test_tokens_that_a_parser_needs_can_be_shown() -> None:
    tokenizer = spm(["<unk>", "<s>", "</s>", "[THINK]"], {"[THINK]": CONTROL, "<s>": CONTROL})
    assert tokenizer.piece(3, show_special=False) == b""
    tokenizer.show_always(["[THINK]", "[NOT THERE]"])
    assert tokenizer.piece(3, show_special=False) == b"[THINK]"
    assert tokenizer.piece(1, show_special=False) == b""


def test_pieces_outside_the_vocabulary_are_errors() -> None:
    tokenizer = spm(["<unk>", "<s>", "</s>"])
    for token in (-1, 3):
        with pytest.raises(IndexError):
            tokenizer.piece(token, show_special=True)


def test_unused_tokens_and_odd_byte_tokens() -> None:
    tokenizer = spm(
        ["<unk>", "u", "<0x41>", "<0xZZ>"], {"u": TokenType.UNUSED, "<0x41>": TokenType.BYTE, "<0xZZ>": TokenType.BYTE}
    )
    assert [tokenizer.piece(token, show_special=True) for token in (1, 2, 3)] == [b"", b"A", b"<0xZZ>"]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_ends_are_added_once(add_bos: bool, add_eos: bool) -> None:
    kinds = {"<s>": CONTROL, "</s>": CONTROL}
    tokens = ["<unk>", "<s>", "</s>", "a"]
    tokenizer = spm(tokens, kinds, add_bos_token=add_bos, add_eos_token=add_eos, add_space_prefix=False)
    full = [1] * add_bos + [3] + [2] * add_eos
    assert tokenizer.encode("a", add_special=True, parse_special=True) == full
    assert tokenizer.encode_prompt("a") == full
    assert tokenizer.encode_prompt("<s>a</s>") == [1, 3, 2]
    assert tokenizer.encode("<s>a", add_special=True, parse_special=True) == [1] * add_bos + [1, 3] + [2] * add_eos
    assert tokenizer.encode("", add_special=True, parse_special=True) == [1] * add_bos + [2] * add_eos


def test_phi3_s_special_tokens_eat_the_white_space_behind_them() -> None:
    metadata = vocabulary(
        "llama", ["<unk>", "<s>", "</s>", "<|end|>", "a"], {"<|end|>": CONTROL, "<s>": CONTROL}, scores=[0.0] * 5
    )
    metadata |= {"general.name": "Phi-3 mini", "tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("<|end|>\n a<s> ", add_special=False, parse_special=True)[:2] == [3, 4]


def test_lone_surrogates_in_text_become_replacement_characters() -> None:
    for name in ("qwen2-Q8_0", "gemma3-Q4_K_M"):
        tokenizer = tiny(name)
        tokens = tokenizer.encode("a\ud800b", add_special=False, parse_special=False)
        assert tokenizer.decode(tokens) == "a\ufffdb"


def test_tidied_spaces_are_for_whole_texts_alone() -> None:
    tokenizer = tiny("llama-Q4_0")
    text = "a , b ' c 's d !"
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(tokens) == "a, b'c's d!"
    assert b"".join(tokenizer.piece(token, show_special=False) for token in tokens).decode() == text


@pytest.mark.parametrize("name", ["llama-yarn-Q8_0", "gemma3-Q4_K_M", "qwen2-Q8_0", "qwen35-Q4_K_M"])
def test_the_fewest_tokens_of_a_text_are_never_more_than_it_has(name: str) -> None:
    tokenizer = tiny(name)
    for text in ("", "a", "hello " * 50, " " * 300, "\n" * 100, "<|im_end|>" * 9, "👨‍👩‍👧" * 20, "é" * 99):
        n_tokens = len(tokenizer.encode(text, add_special=False, parse_special=True))
        for given in (text, text.encode()):
            assert tokenizer.fewest_tokens(given) <= n_tokens
    assert tokenizer.fewest_tokens("a" * 100_000) > 1000
    assert made_up_wpm().fewest_tokens("a" * 100_000) == 0


def made_up_wpm() -> Tokenizer:
    return Tokenizer.from_metadata(vocabulary("bert", ["[UNK]", "▁a"], unknown_token_id=0))


@pytest.mark.parametrize("model", ["llama", "gpt2", "t5"])
def test_three_hundred_thousand_tokens_load_in_time(model: str) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    made = ("".join(word) for n_chars in (2, 3, 4) for word in itertools.product(letters, repeat=n_chars))
    tokens = ["<pad>", "</s>", "<unk>", "<s>", *letters, *itertools.islice(made, 300_000 - 30)]
    keys: dict[str, Any] = {"scores": [float(-n) for n in range(len(tokens))]}
    if model == "gpt2":
        merges = [f"{text[:-1]} {text[-1]}".encode() for text in tokens[30:]]
        keys = {"merges": merges, "pre": "qwen2"}
    metadata = vocabulary(model, [text.encode() for text in tokens], **keys)
    start = time.process_time()
    tokenizer = Tokenizer.from_metadata(metadata)
    ChatTemplate.from_metadata({}, tokenizer)
    assert tokenizer.encode("a few words", add_special=False, parse_special=True)
    assert time.process_time() - start < 3.0
