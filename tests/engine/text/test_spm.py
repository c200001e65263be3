from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.text.special_ids import TokenType
from app.engine.text.spm import NATIVE, SPACE, merge_long, merger
from app.engine.text.tokenizer import Tokenizer
from tests.engine.text.vocabularies import tiny, vocabulary

#: Overlapping tokens with equal and unequal scores, also such as no merge of two tokens makes.
WORDS = ["a", "b", "ab", "ba", "aa", "aba", "abab", "aab", "bb", f"{SPACE}a", f"a{SPACE}b", SPACE * 2, "é", "xyz"]
SCORES = [0, 0, -1, -1, -2, -3, -1.5, -2, -9, -4, -5, -6, -7, 0]


def made_up(**keys: object) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    kinds |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    scores = [0.0] * 259 + [float(score) for score in SCORES]
    return Tokenizer.from_metadata(vocabulary("llama", tokens, kinds, scores=scores, **keys))


def naive(text: str) -> list[str]:
    """Best pair first, leftmost among equals."""
    scores = dict(zip(WORDS, SCORES, strict=True))
    symbols = list(text)
    while True:
        pairs = [
            (-scores[a + b], at) for at, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in scores
        ]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def spelled(tokenizer: Tokenizer, symbols: list[str]) -> list[int]:
    tokens: list[int] = []
    for symbol in symbols:
        token = tokenizer.token_id(symbol)
        tokens += [3 + byte for byte in symbol.encode()] if token is None else [token]
    return tokens


@settings(max_examples=300)
@given(st.text(alphabet="ab é☃", max_size=60))
def test_merges_as_by_looking_at_every_pair(text: str) -> None:
    tokenizer = made_up(add_space_prefix=False)
    expected = spelled(tokenizer, naive(text.replace(" ", SPACE)))
    assert tokenizer.encode(text, add_special=False, parse_special=False) == expected


@settings(max_examples=200)
@given(st.text(alphabet="ab", min_size=1, max_size=200))
def test_the_heap_gives_the_same_as_looking_at_every_pair(text: str) -> None:
    assert merge_long(text, dict(zip(WORDS, map(float, SCORES), strict=True))) == naive(text)


needs_native = pytest.mark.skipif(not NATIVE, reason="the native modules are not built; run `make native`")
scored = st.dictionaries(
    st.text(alphabet="ab\u00e9\udc80🦙", min_size=1, max_size=6), st.sampled_from([0.0, -1.0, -2.5])
)


@needs_native
@settings(max_examples=300)
@given(scored, st.text(alphabet="ab\u00e9\udc80🦙", max_size=60))
def test_native_code_merges_as_the_heap_does(scores: dict[str, float], piece: str) -> None:
    assert merger(scores)(piece) == merge_long(piece, scores)


@needs_native
def test_native_code_copes_with_many_texts_and_long_pieces() -> None:
    scores = {f"{chr(0x4E00 + i)}{chr(0x4E00 + j)}": float(-i) for i in range(60) for j in range(60)}
    piece = "".join(chr(0x4E00 + (i * i) % 61) for i in range(20_000))
    merge = merger(scores)
    assert merge(piece) == merge_long(piece, scores)
    assert (merge(""), merge("x")) == ([], ["x"])


def test_a_space_goes_in_front_at_the_start_and_behind_special_tokens() -> None:
    tokenizer = made_up()
    first, a = tokenizer.token_id(f"{SPACE}a"), tokenizer.token_id("a")
    assert tokenizer.encode("a", add_special=True, parse_special=True) == [1, first]
    assert tokenizer.encode("a<s>a", add_special=False, parse_special=True) == [first, 1, first]
    assert made_up(add_space_prefix=False).encode("a<s>a", add_special=False, parse_special=True) == [a, 1, a]


def test_unknown_characters_become_bytes_and_bytes_survive() -> None:
    tokenizer = made_up(add_space_prefix=False)
    for data in ("☃".encode(), b"\xff\x80", b"\xed\xa0\x80", b"\xc0\xaf"):
        tokens = tokenizer.encode(data, add_special=False, parse_special=False)
        assert tokens == [3 + byte for byte in data]
        assert tokenizer.decode_bytes(tokens) == data


def test_control_tokens_cannot_be_put_together_from_text() -> None:
    """A vocabulary in which `<s` and `>` would merge into a control token."""
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s"]
    kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    tokenizer = Tokenizer.from_metadata(vocabulary("llama", tokens, kinds, scores=[0.0] * 7, add_space_prefix=False))
    assert tokenizer.encode("<s>", add_special=False, parse_special=False) == [6, 5]
    assert tokenizer.encode("<s>", add_special=False, parse_special=True) == [1]


@settings(max_examples=60)
@given(st.binary(max_size=60))
@pytest.mark.parametrize("name", ["gemma3-Q4_K_M", "llama-yarn-Q8_0"])
def test_any_bytes_survive(name: str, data: bytes) -> None:
    tokenizer = tiny(name)
    tokens = tokenizer.encode(data, add_special=False, parse_special=False)
    assert tokenizer.decode_bytes(tokens) == data


@pytest.mark.parametrize("unit", ["a", "ab", "hello world ", "The cat. ", "\n", " "])
def test_long_texts_cost_in_proportion_to_their_length(unit: str) -> None:
    tokenizer = tiny("llama-yarn-Q8_0")

    def seconds(n_chars: int) -> float:
        text = (unit * n_chars)[:n_chars]
        start = time.process_time()
        tokenizer.encode(text, add_special=False, parse_special=False)
        return time.process_time() - start

    seconds(1000)
    assert seconds(80_000) < 16 * seconds(10_000) + 0.2
