"""Constraints by hand: thoughts pass, ends of generation wait, and what is compiled once is kept."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.api.context import VocabularyMarks
from app.engine.constraint import Constrainer, Mask
from app.engine.gguf.writer import Typed
from app.engine.grammar import Grammars
from app.engine.request import Constraint, GenerateRequest, Thought
from app.engine.text.call_grammar import harmony_answer
from app.engine.text.schema_check import ascii_classes, checked_schema
from app.engine.text.tokenizer import Tokenizer
from app.errors import InvalidParameter, RequestError
from tests.fakes.gguf import tokenizer_metadata

YES = Constraint(kind="regex", source="yes( yes)?")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in tokenizer_metadata().items()}
    return Tokenizer.from_metadata(plain)


@pytest.fixture
def constrainer(tokenizer: Tokenizer) -> Iterator[Constrainer]:
    constrainer = Constrainer(tokenizer, Grammars(tokenizer))
    yield constrainer
    constrainer.close()


def request(thought: Thought | None = None) -> GenerateRequest:
    return GenerateRequest(id="r", prompt=(1,), constraint=YES, thought=thought)


def tokens_of(mask: Mask, n_vocab: int) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")[:n_vocab]).tolist())


def test_ends_are_allowed_where_the_text_is_whole(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    constraint = constrainer.make(request())
    assert constraint is not None
    finished = [constraint.push(token) for token in map(int, tokenizer.encode("yes", **PLAIN))]
    assert not any(finished)
    allowed = tokens_of(constraint.allowed(), tokenizer.vocab_size)
    assert tokenizer.eog <= allowed and allowed - tokenizer.eog == set(tokenizer.encode(" ", **PLAIN))
    *others, last = [constraint.push(token) for token in b_tokens(tokenizer, " yes")]
    assert last and not any(others)


def test_repetitions_of_repetitions_are_given_up_early(tokenizer: Tokenizer) -> None:
    """Compiling one takes little memory, and whoever asked is told what it was; the field is named."""
    grammars = Grammars(tokenizer)
    before_bytes = resident_bytes()
    for char in "abc":
        bomb = Constraint(kind="regex", source=f"(({char}{{100}}){{100}}){{100}}", param="guided_regex")
        try:
            matcher = grammars.matcher(bomb)
            matcher.push(tokenizer.encode(char, **PLAIN)[0])
        except RequestError as error:
            assert error.param == "guided_regex" and "guided_regex" in str(error)
    assert resident_bytes() - before_bytes < 192 << 20


def test_long_enums_are_no_bombs(tokenizer: Tokenizer) -> None:
    texts = json.dumps({"enum": [f"value {i} of many" for i in range(10_000)]})
    Grammars(tokenizer).check(Constraint(kind="json_schema", source=texts))


def test_a_grammar_nested_too_deep_is_told_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="nested too deep"):
        Grammars(tokenizer).check(Constraint(kind="gbnf", source="root ::= " + "(" * 20_000, param="grammar"))


def resident_bytes() -> int:
    """What this process holds now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


HIDDEN = {"show_special": False}
PLAIN: dict[str, Any] = {"add_special": False, "parse_special": False}


def b_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of single characters."""
    return [token for char in text for token in tokenizer.encode(char, **PLAIN)]


def test_a_thought_passes_first(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    constraint = constrainer.make(request(Thought(opening="<think>", closing="</think>", is_open=True)))
    assert constraint is not None
    everything = set(range(tokenizer.vocab_size))
    for token in b_tokens(tokenizer, "no, </thin </think>"):
        assert tokens_of(constraint.allowed(), tokenizer.vocab_size) == everything - tokenizer.eog
        assert not constraint.push(token)
    assert tokens_of(constraint.allowed(), tokenizer.vocab_size) == set(tokenizer.encode("y", **PLAIN))


def test_a_thought_may_begin_by_a_tag_that_is_one_token(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    opening = "he"
    (tag,) = tokenizer.encode(opening, **PLAIN)
    start = set(tokenizer.encode("y", **PLAIN))
    for begins in (True, False):
        constraint = constrainer.make(request(Thought(opening=opening, closing="!")))
        assert constraint is not None
        assert tokens_of(constraint.allowed(), tokenizer.vocab_size) == start | {tag}
        for token in [tag, *b_tokens(tokenizer, "hm!")] if begins else []:
            assert not constraint.push(token)
        for token in b_tokens(tokenizer, "yes"):
            assert token in tokens_of(constraint.allowed(), tokenizer.vocab_size)
            assert not constraint.push(token)
        assert tag not in tokens_of(constraint.allowed(), tokenizer.vocab_size)


def test_a_tag_of_several_tokens_may_not_begin_a_thought(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    constraint = constrainer.make(request(Thought(opening="<think>", closing="</think>")))
    assert constraint is not None
    assert tokens_of(constraint.allowed(), tokenizer.vocab_size) == set(tokenizer.encode("y", **PLAIN))


def test_answers_do_not_share_their_way(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    one, other = constrainer.make(request()), constrainer.make(request())
    assert one is not None and other is not None
    one.push(b_tokens(tokenizer, "y")[0])
    assert tokens_of(one.allowed(), tokenizer.vocab_size) != tokens_of(other.allowed(), tokenizer.vocab_size)


def test_markup_is_no_text_even_where_it_shows(tokenizer: Tokenizer) -> None:
    control = {token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token)}
    shown = Tokenizer(tokenizer.vocabulary, tokenizer._model, clean_spaces=False)
    shown.show_always(map(shown.token_text, control))
    anything = Grammars(shown).matcher(Constraint(kind="regex", source="(?s:.*)"))
    assert tokens_of(anything.mask(), shown.vocab_size) & control == shown.eog


@pytest.mark.parametrize("thought", ["", '<|channel|>analysis<|message|>{"no"}<|end|><|start|>assistant'])
def test_a_final_message_follows_the_schema(constrainer: Constrainer, tokenizer: Tokenizer, thought: str) -> None:
    source = harmony_answer('{"const": "yes"}', "response_format", VocabularyMarks(tokenizer))
    wanted = GenerateRequest(id="r", prompt=(1,), constraint=Constraint(kind="lark", source=source))
    constraint = constrainer.make(wanted)
    assert constraint is not None
    left, is_whole = f'{thought}<|channel|>final<|message|>"yes"'.encode(), False
    while left:  # by the longest token that fits: where the text is forced, others are not allowed
        allowed = tokens_of(constraint.allowed(), tokenizer.vocab_size)
        assert not is_whole and not allowed & tokenizer.eog
        fitting = {piece: token for token in allowed if left.startswith(piece := tokenizer.piece(token, **HIDDEN))}
        longest = max(fitting, key=len)
        left, is_whole = left[len(longest) :], constraint.push(fitting[longest])
    # What looks like the answer may be thought where the tags are text; where they are tokens it cannot.
    assert is_whole or thought


@pytest.mark.parametrize(
    ("pattern", "ascii_pattern"),
    [(r"\d+", "[0-9]+"), (r"[\d.]\w", "[0-9.][A-Za-z0-9_]"), (r"\\d[^\]\d]", r"\\d[^\]0-9]"), ("a\\", "a\\")],
)
def test_classes_are_ascii(pattern: str, ascii_pattern: str) -> None:
    assert ascii_classes(pattern) == ascii_pattern


@pytest.mark.parametrize(
    ("branches", "is_exclusive"),
    [
        ('[{"type": "string"}, {"type": ["integer", "null"]}]', True),
        ('[{"type": "integer"}, {"type": "number"}]', False),
        ('[{"const": "a"}, {"enum": ["b", "c"]}]', True),
        ('[{"const": 1}, {"enum": [1.0]}]', False),
        ("[{}, false]", True),
        ("[{}, true]", False),
        ('[{"$ref": "#/$defs/A"}, {"type": "object"}]', True),
        ('[{"$ref": "#/$defs/A"}, {"type": "string"}]', False),
    ],
)
def test_one_of_is_taken_where_branches_exclude_each_other(branches: str, is_exclusive: bool) -> None:
    schema = f'{{"oneOf": {branches}, "$defs": {{"A": {{"type": "string"}}}}}}'
    if is_exclusive:
        checked_schema(schema, "p")
    else:
        with pytest.raises(InvalidParameter, match="oneOf"):
            checked_schema(schema, "p")
