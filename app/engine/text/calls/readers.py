"""Read the arguments of a call while they stream, and write them as JSON: piece by piece, each sure when it is told."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from app.engine.text.calls.base import Tools, json_at, parameter_schema, skip_spaces, typed_value, types_of
from app.engine.text.fields import partial_tail


class State(Enum):
    """Whether arguments go on, are whole, or turned out to be none: what follows is text again."""

    MORE = auto()
    WHOLE = auto()
    BROKEN = auto()


#: New JSON text, how far was read, and the state there.
Read = tuple[str, int, State]


class Reader(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str, at: int) -> Read:
        """Go on at `at`, where the last reading ended; `text` has all that was there before, and more."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A call whose name is known and whose arguments begin at `at`. `id` is the model's own, where it writes one."""

    name: str
    at: int
    reader: Reader
    id: str | None = None


_OUTSIDE = re.compile(r'["{}\[\]]|[^\s0-9+\-.eEtrufalsn,:]')
_INSIDE = re.compile(r'["\\]')
#: Line breaks and the like that a model wrote into a string as they are.
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(32)}


class JsonReader:
    """Arguments that are JSON already: an object, told as it is written."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def read(self, text: str, at: int) -> Read:
        told: list[str] = []
        while at < len(text):
            start = at
            if self._in_string:
                at = self._string_end(text, at)
                told.append(text[start:at].translate(_ESCAPES))
                continue
            found = _OUTSIDE.search(text, at)
            if found is None:
                return "".join([*told, text[at:]]), len(text), State.MORE
            if found[0] not in '"{}[]':
                return "".join([*told, text[at : found.start()]]), found.start(), State.BROKEN
            at = found.end()
            told.append(text[start:at])
            self._in_string = found[0] == '"'
            self._depth += (found[0] in "{[") - (found[0] in "}]")
            if not self._depth:
                return "".join(told), at, State.WHOLE
        return "".join(told), at, State.MORE

    def _string_end(self, text: str, at: int) -> int:
        """Where the string ends, or what there is of it."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = _INSIDE.search(text, at)
        if found is None:
            return len(text)
        self._in_string = found[0] != '"'
        self._is_escaped = found[0] == "\\"
        return found.end()


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks parameters. `opening` has the parameter's name as its first group, and as its second whether
    the value is text, where the family says so. `end` closes the call, and is read, too.

    `trims`: a line break next to the tags is not part of the value.
    """

    opening: re.Pattern[str]
    closing: str
    end: str
    trims: bool = False


class TagReader:
    """Arguments with each parameter in tags. Text is told as it comes, other values when they are whole."""

    def __init__(self, tags: Tags, tools: Tools, name: str) -> None:
        self._tags = tags
        self._tools = tools
        self._name = name
        self._n_told = 0
        self._schema: Any = None  # of the parameter we are in
        self._key: str | None = None
        self._is_text = False
        self._is_fresh = False  # nothing of its value was read

    def read(self, text: str, at: int) -> Read:
        told: list[str] = []
        state = State.MORE
        while state is State.MORE:
            before = at, self._key
            piece, at, state = self._between(text, at) if self._key is None else self._value(text, at)
            told.append(piece)
            if (at, self._key) == before:
                break
        return "".join(told), at, state

    def _between(self, text: str, at: int) -> Read:
        """Up to the next parameter, or to the end."""
        opening = self._tags.opening.search(text, at)
        end = text.find(self._tags.end, at)
        if end >= 0 and (opening is None or end < opening.start()):
            return "}" if self._n_told else "{}", end + len(self._tags.end), State.WHOLE
        if opening is None:
            return "", at, State.MORE
        self._key, self._is_fresh = opening[1].strip(), True
        marked = opening[2] if self._tags.opening.groups > 1 else None
        self._schema = {"type": "string"} if marked == "true" else parameter_schema(self._tools, self._name, self._key)
        self._is_text = marked == "true" or (marked is None and types_of(self._schema) == {"string"})
        if marked == "false":
            self._schema = {}
        told = (", " if self._n_told else "{") + json.dumps(self._key, ensure_ascii=False) + ": "
        self._n_told += 1
        return told + ('"' if self._is_text else ""), opening.end(), State.MORE

    def _value(self, text: str, at: int) -> Read:
        tags = self._tags
        if self._is_fresh and tags.trims and at < len(text):
            at += text[at] == "\n"
        self._is_fresh = self._is_fresh and at == len(text)
        closing = text.find(tags.closing, at)
        if closing < 0:
            if not self._is_text:
                return "", at, State.MORE
            keep = partial_tail(text[at:], (tags.closing, *(["\n" + tags.closing] if tags.trims else [])))
            return _escaped(text[at : len(text) - keep]), len(text) - keep, State.MORE
        value = text[at:closing]
        if tags.trims:
            value = value.removesuffix("\n")
        told = _escaped(value) + '"' if self._is_text else _json(typed_value(value, self._schema))
        self._key = None
        return told, closing + len(tags.closing), State.MORE


def _escaped(text: str) -> str:
    """Text within the quotes of a JSON string."""
    return _json(text)[1:-1]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class BareReader:
    """Gemma's notation: names bare, and text between quotes of its own. Becomes JSON word by word."""

    _NAME = re.compile(r"[^{}\[\],:<]+")
    _WORD = re.compile(r"[^\s{}\[\],:<]+")

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._closers: list[str] = []
        self._in_text = False
        self._is_key = False  # a name comes next

    def read(self, text: str, at: int) -> Read:
        told: list[str] = []
        while at < len(text):
            piece, to, state = self._text(text, at) if self._in_text else self._sign(text, at)
            told.append(piece)
            if state is not State.MORE or to == at:
                return "".join(told), to, state
            at = to
        return "".join(told), at, State.MORE

    def _text(self, text: str, at: int) -> Read:
        end = text.find(self._quote, at)
        if end >= 0:
            self._in_text = False
            return _escaped(text[at:end]) + '"', end + len(self._quote), State.MORE
        to = len(text) - partial_tail(text[at:], (self._quote,))
        return _escaped(text[at:to]), to, State.MORE

    def _sign(self, text: str, at: int) -> Read:
        at = skip_spaces(text, at)
        rest = text[at : at + len(self._quote)]
        if not rest or (self._quote.startswith(rest) and rest != self._quote):
            return "", at, State.MORE
        if rest == self._quote:
            self._in_text = True
            return '"', at + len(rest), State.MORE
        sign = text[at]
        if sign in "{[":
            self._closers.append("}" if sign == "{" else "]")
            self._is_key = sign == "{"
        elif sign in "}]":
            if not self._closers or self._closers.pop() != sign:
                return "", at, State.BROKEN
            return sign, at + 1, State.MORE if self._closers else State.WHOLE
        elif sign == ",":
            self._is_key = self._closers[-1:] == ["}"]
            return ", ", at + 1, State.MORE
        elif sign == ":":
            self._is_key = False
            return ": ", at + 1, State.MORE
        elif self._is_key:
            return self._name(text, at)
        else:
            return self._word(text, at)
        return sign, at + 1, State.MORE

    def _name(self, text: str, at: int) -> Read:
        found = self._NAME.match(text, at)
        if found is None:
            return "", at, State.BROKEN
        if found.end() == len(text):
            return "", at, State.MORE
        return _json(found[0].strip()), found.end(), State.MORE

    def _word(self, text: str, at: int) -> Read:
        """A number, true, false or null: known when something else follows. Or text as JSON has it."""
        if text[at] == '"':
            quoted = json_at(text, at)
            return ("", at, State.MORE) if quoted is None else (_json(quoted[0]), quoted[1], State.MORE)
        found = self._WORD.match(text, at)
        if found is None:
            return "", at, State.BROKEN
        if found.end() == len(text):
            return "", at, State.MORE
        try:
            value = json.loads(found[0])
        except ValueError:
            return "", at, State.BROKEN
        return _json(value), found.end(), State.MORE
