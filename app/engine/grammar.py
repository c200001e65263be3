"""Grammars that answers must follow, compiled for one vocabulary.

llguidance walks a grammar byte by byte over a trie of all tokens; here it learns our vocabulary, its errors become
refusals of a request, and compiled grammars are kept, since clients send the same few again and again.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from app.engine.request import Constraint
from app.engine.text.schema_check import ascii_classes, checked_schema
from app.engine.text.tokenizer import Tokenizer
from app.errors import InvalidParameter, NoTokenLeft

#: Compiled grammars that are kept, and the longest source that is compiled at all.
_KEPT, _MOST_CHARS = 32, 1 << 20
#: Work on a grammar's texts in compiling it. A repetition of repetitions eats up whatever there is, the default within
#: four seconds and 160 MiB; this much takes a fifth of both, and is enough for an enum of 15,000 texts.
_LEXER_FUEL = 200_000
#: White space between the parts of a JSON text: free to be pretty, but not without end.
_WHITESPACE = r"[ ]?|\n[ \t]{0,32}"
_MESSAGE_CHARS = 300
_DUMP = re.compile(r"<state>|\n *\d+ \| ")


class Matcher:
    """One answer's way through a grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param  # the field the grammar came in

    def mask(self) -> NDArray[np.uint8]:
        """The tokens that may come next, one bit each, lowest bit first; ends of generation where the text is whole.

        Raises NoTokenLeft when the grammar became too complex to go on.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._given_up()
        return mask

    def push(self, token: int) -> bool:
        """Go on by a token of the mask; whether the grammar is finished, so that nothing can follow."""
        if not self._matcher.consume_token(token):
            raise self._given_up()
        return bool(self._matcher.is_stopped())

    def _given_up(self) -> NoTokenLeft:
        reason = _short(self._matcher.get_error())
        return NoTokenLeft(
            f"{self._param} is too complex to be followed any further; ask for less at once: {reason}",
            param=self._param,
        )


class Grammars:
    """Compiles constraints for one tokenizer and keeps them. Thread-safe; compiling may take long."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def check(self, constraint: Constraint) -> None:
        """Compile it, or raise InvalidParameter that says what is wrong with it."""
        self._prototype(constraint)

    def matcher(self, constraint: Constraint) -> Matcher:
        """A new one, at the beginning; quick when the constraint was checked before."""
        return Matcher(self._prototype(constraint).deep_copy(), constraint.param)

    def _prototype(self, constraint: Constraint) -> LLMatcher:
        key = (constraint.kind, constraint.source)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
            vocabulary = self._vocabulary = self._vocabulary or _vocabulary(self._tokenizer)
        made = _compile(constraint, vocabulary)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


def _compile(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    if len(constraint.source) > _MOST_CHARS:
        raise InvalidParameter(
            f"{constraint.param} has {len(constraint.source)} characters, at most {_MOST_CHARS} are compiled",
            param=constraint.param,
        )
    try:
        limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL)
        matcher = LLMatcher(vocabulary, _source(constraint), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except InvalidParameter:
        raise
    except RecursionError:
        raise _refusal(constraint, "it is nested too deep") from None
    except Exception as error:  # whatever the library raises, it is about what the client sent
        raise _refusal(constraint, _short(str(error))) from error
    if matcher.is_error():
        raise _refusal(constraint, _short(matcher.get_error()))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise _refusal(constraint, "no text can meet it")
    return matcher


def _source(constraint: Constraint) -> str:
    """The constraint as llguidance takes it."""
    if constraint.kind == "json_schema":
        schema = checked_schema(constraint.source, constraint.param)
        options: Any = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(ascii_classes(constraint.source))
    if constraint.kind == "gbnf":
        return LLMatcher.grammar_from_lark(gbnf_to_lark(constraint.source))
    return LLMatcher.grammar_from_lark(constraint.source)


def _refusal(constraint: Constraint, reason: str) -> InvalidParameter:
    return InvalidParameter(f"{constraint.param} cannot be compiled: {reason}", param=constraint.param)


def _short(message: str) -> str:
    """What llguidance says, without its dumps of the parser's state and of the source's lines."""
    text = " ".join(_DUMP.split(message)[0].split())
    return text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}..."


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    eog = sorted(tokenizer.eog)
    if not eog:
        raise InvalidParameter("this model has no end-of-generation token, so its answers cannot follow a grammar")
    return LLTokenizer(_Wrapper(tokenizer, eog), eos_token=eog)  # type: ignore[arg-type]


class _Wrapper:
    """Our tokenizer as llguidance reads it. Control tokens are no text: a grammar can only name them by their ids."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eog: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eog[0]
        self.bos_token_id = tokenizer.bos
        pieces = [tokenizer.piece(token, show_special=False) for token in range(tokenizer.vocab_size)]
        hidden = (token for token, piece in enumerate(pieces) if not piece or tokenizer.is_control(token))
        self.special_token_ids = sorted({*eog, *hidden})
        special = set(self.special_token_ids)
        self.tokens = [b"<[%d]>" % i if i in special else piece for i, piece in enumerate(pieces)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)
