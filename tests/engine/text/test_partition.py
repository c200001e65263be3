from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.text.partition import Fragment, Partition, SpecialToken

texts = st.text(alphabet="ab<>\n", max_size=24)


def by_the_rule(tokens: list[str], text: str) -> list[Fragment]:
    """Longer tokens first; each splits every raw fragment at all its occurrences."""
    fragments: list[Fragment] = [text]
    for i, token in sorted(enumerate(tokens), key=lambda item: -len(item[1])):
        split: list[Fragment] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                split.append(fragment)
                continue
            for n, raw in enumerate(fragment.split(token)):
                split += [i, raw] if n else [raw]
        fragments = split
    return [fragment for fragment in fragments if fragment != ""]


@settings(max_examples=400)
@given(st.lists(st.text(alphabet="ab<>\n", min_size=1, max_size=5), max_size=6, unique=True), texts)
def test_equals_the_rule_for_any_set_of_tokens(tokens: list[str], text: str) -> None:
    partition = Partition([SpecialToken(i, token) for i, token in enumerate(tokens)])
    same_length = {len(token) for token in tokens}
    if len(same_length) == len(tokens):  # between tokens of one length the rule says nothing
        assert partition.split(text) == by_the_rule(tokens, text)
    joined = "".join(f if isinstance(f, str) else tokens[f] for f in partition.split(text))
    assert joined == text


def test_the_longest_token_wins_over_an_earlier_one_that_it_overlaps() -> None:
    partition = Partition([SpecialToken(0, "<a>"), SpecialToken(1, ">bcd")])
    assert partition.split("x<a>bcd") == ["x<a", 1]


def test_runs_are_taken_in_the_longest_steps() -> None:
    partition = Partition([SpecialToken(n, "\n" * n) for n in range(1, 32)])
    assert partition.split("a" + "\n" * 70) == ["a", 31, 31, 8]


def test_some_tokens_eat_white_space_around_them() -> None:
    partition = Partition([SpecialToken(0, "<m>", eats_before=True), SpecialToken(1, "<e>", eats_after=True)])
    assert partition.split("a  <m> b <e>  c ") == ["a", 0, " b ", 1, "c "]
    assert partition.split("<e>   <m>") == [1, 0]


def test_tokens_that_begin_each_other_by_the_hundred_are_no_trouble() -> None:
    partition = Partition([SpecialToken(n, "ab" * n) for n in range(1, 400)])
    assert partition.split("ab" * 399 + "x" + "ab") == [399, "x", 1]


def test_thousands_of_tokens_in_a_long_text_take_no_time() -> None:
    partition = Partition([SpecialToken(i, f"<unused{i}>") for i in range(6000)])
    text = "some text, some <unused <unused77> more\n" * 25_000
    start = time.process_time()
    assert len(partition.split(text)) == 50_001
    assert time.process_time() - start < 2.0
