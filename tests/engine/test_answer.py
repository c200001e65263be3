"""Growing answers: whole characters, no part of a stop string, and records that stand for exactly the text."""

from __future__ import annotations

import random

import pytest

from app.engine.answer import Answer
from app.engine.gguf.writer import Typed
from app.engine.request import Delta, FinishReason, TokenInfo
from app.engine.text.tokenizer import Tokenizer
from tests.fakes.gguf import tokenizer_metadata


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    metadata = {key: v.value if isinstance(v, Typed) else v for key, v in tokenizer_metadata().items()}
    return Tokenizer.from_metadata(metadata)


def infos(tokenizer: Tokenizer, text: bytes) -> list[TokenInfo]:
    """One token per byte."""
    return [TokenInfo(token=b, piece=tokenizer.piece(b, show_special=False)) for b in text]


def answer(tokenizer: Tokenizer, *stop: str, max_tokens: int | None = None, ignore_eos: bool = False) -> Answer:
    return Answer(tokenizer, stop=stop, max_tokens=max_tokens, ignore_eos=ignore_eos, show_special=False)


def feed(growing: Answer, tokens: list[TokenInfo]) -> list[Delta]:
    deltas = []
    for token in tokens:
        delta = growing.push(token)
        deltas += [delta] if delta is not None else []
        if growing.finish_reason is not None:
            break
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, bytes]:
    return "".join(d.text for d in deltas), b"".join(info.piece for d in deltas for info in d.tokens)


def test_characters_leave_whole_and_tokens_with_them(tokenizer: Tokenizer) -> None:
    growing = answer(tokenizer)
    deltas = feed(growing, infos(tokenizer, "a€🙂b".encode()))
    assert [d.text for d in deltas] == ["a", "€", "🙂", "b"]
    assert [len(d.tokens) for d in deltas] == [1, 3, 4, 1]


def test_half_a_character_at_the_end_leaves_as_its_replacement(tokenizer: Tokenizer) -> None:
    growing = answer(tokenizer)
    deltas = feed(growing, infos(tokenizer, b"a\xe2\x82"))
    last = growing.finish(FinishReason.LENGTH)
    assert last is not None
    text, pieces = joined([*deltas, last])
    assert text == "a\ufffd" and pieces == b"a\xe2\x82"


def test_a_stop_string_and_its_tokens_never_leave(tokenizer: Tokenizer) -> None:
    growing = answer(tokenizer, "STOP", "\n\n")
    deltas = feed(growing, infos(tokenizer, b"so STO, then STOP and more"))
    assert joined(deltas) == ("so STO, then ", b"so STO, then ")
    assert (growing.finish_reason, growing.stop_string) == (FinishReason.STOP, "STOP")


def test_a_half_stop_leaves_when_the_answer_ends(tokenizer: Tokenizer) -> None:
    growing = answer(tokenizer, "STOP", max_tokens=5)
    deltas = feed(growing, infos(tokenizer, b"a STOP"))
    assert joined(deltas) == ("a STO", b"a STO")
    assert (growing.finish_reason, growing.stop_string) == (FinishReason.LENGTH, None)


def test_a_stop_on_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    growing = answer(tokenizer, "OP", max_tokens=4)
    assert joined(feed(growing, infos(tokenizer, b"STOP"))) == ("ST", b"ST")
    assert growing.finish_reason is FinishReason.STOP


def test_the_end_token_ends_unless_it_is_ignored(tokenizer: Tokenizer) -> None:
    end = TokenInfo(token=min(tokenizer.eog), piece=b"")
    growing = answer(tokenizer)
    assert joined(feed(growing, [*infos(tokenizer, b"hi"), end, *infos(tokenizer, b"!")])) == ("hi", b"hi")
    assert growing.finish_reason is FinishReason.STOP and growing.n_tokens == 3
    going_on = answer(tokenizer, ignore_eos=True)
    assert joined(feed(going_on, [*infos(tokenizer, b"hi"), end, *infos(tokenizer, b"!")])) == ("hi!", b"hi!")


def test_text_and_records_always_agree(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choice(["a", "b", "é", "€", "🙂", "ab", "\n"]) for _ in range(rng.randint(1, 12)))
        stops = [s for s in ("ab", "b\n", "€a") if rng.random() < 0.5]
        growing = answer(tokenizer, *stops)
        deltas = feed(growing, infos(tokenizer, text.encode()))
        if growing.finish_reason is None:
            last = growing.finish(FinishReason.LENGTH)
            deltas += [last] if last is not None else []
        shown, pieces = joined(deltas)
        cut = min((text.index(s) + len(s) for s in stops if s in text), default=None)
        if cut is None:
            assert shown == text and growing.stop_string is None
        else:
            assert growing.stop_string is not None and text[:cut] == shown + growing.stop_string
        assert pieces.decode() == shown
