from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from app.engine.text.bpe import BpeModel, byte_characters, chunks_of
from app.engine.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from app.engine.text.special_ids import TokenType
from app.engine.text.tokenizer import Tokenizer
from app.errors import FormatError, UnsupportedModel
from tests.engine.text.vocabularies import TINY, tiny, vocabulary

BYTE_LEVEL = [name for name in TINY if not name.startswith(("gemma3", "llama-yarn"))]
LETTERS = list(byte_characters())


def made_up(merges: list[str], pre: str = "gpt-2", more: tuple[str, ...] = ()) -> Tokenizer:
    results = [merge.replace(" ", "", 1) for merge in merges]
    return Tokenizer.from_metadata(vocabulary("gpt2", [*LETTERS, *results, *more], pre=pre, merges=merges))


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    return [tokenizer.token_text(token) for token in tokens]


def test_bytes_map_to_printable_characters() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert (characters[ord(" ")], characters[ord("\n")], characters[ord("A")], characters[0xAD]) == ("Ġ", "Ċ", "A", "Ń")


def test_lower_ranks_merge_first_and_the_first_of_equal_entries_counts() -> None:
    assert pieces_of(made_up(["b c", "a b"]), "abc") == ["a", "bc"]
    assert pieces_of(made_up(["a b", "b c"]), "abc") == ["ab", "c"]
    tokens = [*LETTERS, "ab", "bc"]
    again = vocabulary("gpt2", tokens, pre="gpt-2", merges=["b c", "a b", "b c"])
    assert pieces_of(Tokenizer.from_metadata(again), "abc") == ["a", "bc"]


def test_a_merge_may_hold_a_space_as_its_first_character() -> None:
    assert pieces_of(made_up(["Ġ a"]), " a") == ["Ġa"]


def test_merged_symbols_that_are_no_tokens_are_spelled() -> None:
    tokenizer = Tokenizer.from_metadata(vocabulary("gpt2", [*LETTERS, "abc"], pre="gpt-2", merges=["a b", "ab c"]))
    assert pieces_of(tokenizer, "abc") == ["abc"]
    assert pieces_of(tokenizer, "abd") == ["a", "b", "d"]


def test_whole_words_skip_the_merges_in_families_that_say_so() -> None:
    merges = ["a b"]
    assert pieces_of(made_up(merges, "llama-bpe", ("abc",)), "abc") == ["abc"]
    assert pieces_of(made_up(merges, "dbrx", ("abc",)), "abc") == ["ab", "c"]


def test_characters_beside_the_table_are_dropped() -> None:
    tokens = [letter for letter in LETTERS if letter != "a"]
    tokenizer = Tokenizer.from_metadata(vocabulary("gpt2", tokens, pre="gpt-2", merges=[]))
    assert pieces_of(tokenizer, "bab") == ["b", "b"]


def test_text_never_becomes_a_control_token() -> None:
    tokens = [*LETTERS, "ab"]
    metadata = vocabulary("gpt2", tokens, {"ab": TokenType.CONTROL}, pre="llama-bpe", merges=["a b"])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert pieces_of(tokenizer, "ab") == ["a", "b"]
    assert tokenizer.encode("ab", add_special=False, parse_special=True) == [256]


def test_a_file_without_merges_is_refused_unless_ids_are_ranks() -> None:
    metadata = vocabulary("gpt2", [*LETTERS, "ab", "abc"], pre="gpt-2")
    with pytest.raises(FormatError, match="merges"):
        Tokenizer.from_metadata(metadata)
    assert pieces_of(Tokenizer.from_metadata({**metadata, "tokenizer.ggml.pre": "kimi-k2"}), "abcd") == ["abc", "d"]


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'nobody'.*qwen35"):
        made_up([], "nobody")


def test_raw_vocabularies_take_spaces_newlines_and_bytes_their_own_way() -> None:
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "▁", "▁a", "\n", "\n\n\n"]
    kinds = {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    metadata = vocabulary("gemma4", tokens, kinds, merges=["▁ a"], bos_token_id=0)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.add_bos
    assert pieces_of(tokenizer, "a a\n\n\n") == ["a", "▁a", "\n\n\n"]
    assert pieces_of(tokenizer, "\n\n") == ["\n", "\n"]
    assert pieces_of(tokenizer, "é") == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" aé", add_special=False, parse_special=False)) == " aé"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("default", "a=b 1234", ["a", "=", "b", " ", "123", "4"]),
        ("llama-bpe", "It's 12345\n\n  x", ["It", "'s", " ", "123", "45", "\n\n", " ", " x"]),
        ("qwen2", "IT'S 12", ["IT", "'S", " ", "1", "2"]),
        ("qwen35", "हिन्दी x", ["हिन्दी", " x"]),
        ("gpt-2", "a  b\n\nc", ["a", " ", " b", "\n", "\n", "c"]),
        ("smollm", "a12 b", ["a", "1", "2", " b"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("deepseek-v3", "abc，你好1234", ["abc", "，", "你好", "123", "4"]),
        ("deepseek-coder", "a b, 12\n", ["a", " b", ",", " ", "1", "2", "\n"]),
        ("tekken", "camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("gpt-4o", "camelCase's 1234/\n", ["camel", "Case's", " ", "123", "4", "/\n"]),
        ("kimi-k2", "你好abc", ["你好", "abc"]),
        ("tiny_aya", "12345678", ["12", "345", "678"]),
        ("afmoe", "12345678 가나", ["12", "345", "678", " ", "가나"]),
        ("superbpe", "by the way 1234", ["by the way ", "1", "234"]),
        ("bloom", "one, two", ["one", ",", " two"]),
        ("youtu", "한글ABC", ["한글", "ABC"]),
        ("jais-2", "a" + " " * 5 + "b", ["a", " " * 4, " b"]),
        ("exaone-moe", "two words 1", ["two words", " ", "1"]),
        ("chameleon", "a  b", ["a", "  ", "b"]),
        ("laguna", "a b\nc", ["a", " b", "\n", "c"]),
    ],
)
def test_families_cut_text_in_their_own_ways(pre: str, text: str, pieces: list[str]) -> None:
    cutter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer(pre).patterns]
    )
    assert [piece for piece, _ in cutter.pre_tokenize_str(text)] == pieces


words = st.sampled_from(
    ["word", " ", "  ", "\n", "12", "345", "'s", "。", "，", "你好", "é", "=", "...", "\t", "한", "a", "B", "🙂", "x y"]
)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(words, max_size=60))
def test_cutting_a_long_text_changes_nothing(pre: str, parts: list[str]) -> None:
    tokenizer = _plain(pre)
    model = tokenizer._model
    assert isinstance(model, BpeModel)
    text = "".join(parts)
    whole = tokenizer.encode(text, add_special=False, parse_special=False)
    chunks = list(chunks_of(text, model._cut, 3))
    assert "".join(chunks) == text
    assert [token for chunk in chunks for token in model.encode(chunk, False)] == whole


def _plain(pre: str) -> Tokenizer:
    """Pairs of letters merge, so that a piece that is cut shows."""
    if pre not in _made:
        pairs = [
            "w o",
            "r d",
            "Ġ w",
            "Ċ Ċ",
            "Ġ Ġ",
            "1 2",
            "3 4",
            "34 5",
            "2 3",
            ". .",
            "d Ġ",
            "s Ġ",
            "x Ġ",
            "Ġ Ċ",
            "a B",
        ]
        if pre_tokenizer(pre).raw:
            pairs = [pair.replace("Ġ", "▁").replace("Ċ", "\n") for pair in pairs]
            tokens = [*LETTERS, "▁", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
        else:
            tokens = LETTERS
        tokens = list(dict.fromkeys([*tokens, *(pair.replace(" ", "", 1) for pair in pairs)]))
        _made[pre] = Tokenizer.from_metadata(vocabulary("gpt2", tokens, pre=pre, merges=pairs))
    return _made[pre]


_made: dict[str, Tokenizer] = {}


def test_chunks_are_cut_at_the_first_good_place() -> None:
    assert list(chunks_of("abc def ghi", re.compile("[a-z](?= )"), 2)) == ["abc", " def", " ghi"]
    assert list(chunks_of("abcdefghi", re.compile("[a-z](?= )"), 2)) == ["abcdefghi"]
    assert list(chunks_of("abc def", None, 2)) == ["abc def"]


@pytest.mark.parametrize("name", BYTE_LEVEL)
@settings(max_examples=40)
@given(data=st.binary(max_size=60))
def test_any_bytes_survive_as_text(name: str, data: bytes) -> None:
    tokenizer = tiny(name)
    tokens = tokenizer.encode(data, add_special=False, parse_special=False)
    back = b"".join(tokenizer.piece(token, show_special=True) for token in tokens)
    escaped = data.decode("utf-8", "surrogateescape")
    assert back.decode() == "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in escaped)


@pytest.mark.parametrize("unit", ["a", "ab ", "12", "\n", " ", "!?", "你"])
def test_long_texts_cost_in_proportion_to_their_length(unit: str) -> None:
    tokenizer = tiny("qwen2-Q8_0")

    def seconds(n_chars: int) -> float:
        text = (unit * n_chars)[:n_chars]
        start = time.process_time()
        tokenizer.encode(text, add_special=False, parse_special=False)
        return time.process_time() - start

    seconds(1000)
    assert seconds(160_000) < 16 * seconds(20_000) + 0.3


def test_a_token_that_is_not_utf_8_is_named() -> None:
    with pytest.raises(FormatError, match=r"token 256 .*not UTF-8.*x80"):
        made_up([], more=("a\udc80",))
