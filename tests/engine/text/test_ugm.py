from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.text.charsmap import CharsMap
from app.engine.text.special_ids import TokenType
from app.engine.text.tokenizer import Tokenizer
from app.errors import FormatError
from tests.engine.text.vocabularies import vocabulary

SPECIAL = ["<pad>", "</s>", "<unk>"]
SCORES = {"▁": -2.0, "a": -3.0, "b": -3.5, "ab": -4.0, "▁a": -3.2, "▁ab": -8.0, "ba": -5.0, "é": -6.0}
KINDS = {"<pad>": TokenType.CONTROL, "</s>": TokenType.CONTROL, "<unk>": TokenType.UNKNOWN}


def made_up(**keys: object) -> Tokenizer:
    scores = [0.0, 0.0, 0.0, *SCORES.values(), 0.0]
    tokens = [*SPECIAL, *SCORES, "<ud>"]
    return Tokenizer.from_metadata(
        vocabulary(
            "t5", tokens, KINDS | {"<ud>": TokenType.USER_DEFINED}, scores=scores, add_space_prefix=False, **keys
        )
    )


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    return [tokenizer.token_text(token) for token in tokens]


def best(text: str) -> float:
    """The highest sum of scores over all segmentations; unknown characters cost ten more than the worst token."""
    unknown = min(SCORES.values()) - 10
    sums = [0.0] + [-1e9] * len(text)
    for end in range(1, len(text) + 1):
        for start in range(end):
            piece = text[start:end]
            score = SCORES.get(piece, unknown if len(piece) == 1 else -1e9)
            sums[end] = max(sums[end], sums[start] + score)
    return sums[-1]


@settings(max_examples=200)
@given(st.text(alphabet="ab é☃", max_size=20))
def test_finds_the_best_segmentation(text: str) -> None:
    tokenizer = made_up()
    unknown = min(SCORES.values()) - 10
    marked = text.replace(" ", "▁")
    tokens = texts(tokenizer, text)
    n_unknown = sum(char not in "ab▁é" for char in marked)
    assert sum(SCORES[token] for token in tokens if token != "<unk>") + unknown * n_unknown == pytest.approx(
        best(marked)
    )


def test_runs_of_unknown_characters_are_one_token() -> None:
    assert texts(made_up(), "a☃☃☃b☃") == ["a", "<unk>", "b", "<unk>"]


def test_spaces_are_merged_or_put_in_front_as_the_file_says() -> None:
    assert texts(made_up(remove_extra_whitespaces=True), "  a   b ") == ["▁a", "▁", "b"]
    assert texts(made_up(), "a  b") == ["a", "▁", "▁", "b"]
    prefixed = Tokenizer.from_metadata(
        vocabulary("t5", [*SPECIAL, *SCORES], KINDS, scores=[0.0] * 3 + [*SCORES.values()], add_space_prefix=True)
    )
    assert texts(prefixed, "ab") == ["▁", "ab"]
    assert texts(prefixed, " a") == ["▁", "▁a"]


def test_user_defined_tokens_always_match_and_control_tokens_never() -> None:
    assert texts(made_up(), "a<ud>b</s>") == ["a", "<ud>", "b", "<unk>"]
    tokenizer = made_up()
    assert tokenizer.encode("a</s>", add_special=True, parse_special=True) == [4, 1, 1]


def test_a_file_without_scores_is_refused() -> None:
    with pytest.raises(FormatError, match="scores"):
        Tokenizer.from_metadata(vocabulary("t5", ["<pad>", "</s>", "<unk>"], KINDS))


def charsmap(entries: dict[bytes, str]) -> bytes:
    """A table in the file's layout: every node of the trie gets a block of 256 units of its own."""
    nodes = sorted({entry[:n] for entry in entries for n in range(len(entry) + 1)})
    replacements, offsets = b"", {}
    for entry, text in entries.items():
        offsets[entry] = len(replacements)
        replacements += text.encode() + b"\0"
    # The children of node k lie at base_k ^ byte; a value lies at base_k ^ 0.
    bases = {node: 256 * (k + 1) for k, node in enumerate(nodes)}
    units = [0] * (256 * (len(nodes) + 1))
    places = {b"": 0}
    for node in nodes:
        place = places[node]
        units[place] |= (bases[node] ^ place) << 10 if (bases[node] ^ place) < 1 << 21 else 0
        for child in nodes:
            if child[:-1] == node and child:
                places[child] = bases[node] ^ child[-1]
                units[places[child]] = child[-1]
        if node in offsets:
            units[place] |= 1 << 8
            units[bases[node]] = offsets[node] | 1 << 31
    blob = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(blob)) + blob + replacements


def test_a_charsmap_replaces_the_longest_entry_at_each_place() -> None:
    table = CharsMap(charsmap({"ﬁ".encode(): "fi", b"e\xcc\x81": "é", b"\t": " ", "é☃".encode(): "!"}))
    assert table.apply("ﬁne\tcafe\u0301 e é é☃☃") == "fine café e é !☃"
    assert table.apply("nothing") == "nothing"
    assert table.apply("") == ""


def test_the_tokenizer_applies_the_charsmap_first() -> None:
    blob = charsmap({"Ａ".encode(): "a", b"\t": " "})
    for stored in (list(blob), blob):
        assert texts(made_up(precompiled_charsmap=stored), "Ａ\tb") == ["a", "▁", "b"]


def test_a_damaged_charsmap_is_refused() -> None:
    with pytest.raises(FormatError, match="charsmap"):
        CharsMap(b"\xff\xff\xff\x7f1234")
    blob = charsmap({b"ab": "x"})
    with pytest.raises(FormatError, match="charsmap"):
        CharsMap(struct.pack("<I", 4 * 200) + blob[4 : 4 + 4 * 200]).apply("ab")
