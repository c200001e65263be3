"""Reads long JSON texts without holding up other threads.

The usual parser works through a whole text in one call, during which nothing else in this process runs: half a second
and more for tens of megabytes of small values. This one returns to the interpreter between values, so the event loop
gets its turns. It takes longer, which is why short texts are not read by it.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

#: The deepest nesting, as the usual parser has it.
DEEPEST = 201
#: Characters of a row of numbers that are read in one call: about a millisecond.
RUN_CHARS = 1 << 16

_SPACES = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_RUN = re.compile(r"[-+.,\deE \t\r\n]*", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
#: Digits beyond which a whole number is no number of ours.
_MOST_DIGITS = 4000


def parse_long(body: bytes) -> Any:
    """The value of a UTF-8 JSON text. Raises json.JSONDecodeError; a repeated key's last value counts."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"invalid UTF-8 at byte {error.start}", "", 0) from None
    return _Reading(text).value()


class _Reading:
    """One reading, with the containers that are open on a stack: depth costs no recursion."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._stack: list[tuple[dict[str, Any] | list[Any], str]] = []  # a container, and the key it waits at

    def value(self) -> Any:
        value = self._next()
        while True:
            while self._stack:  # put the value into the container it belongs to
                container, key = self._stack[-1]
                if isinstance(container, dict):
                    container[key] = value
                else:
                    container.append(value)
                if self._closes(container):
                    value = self._stack.pop()[0]
                    continue
                break
            if not self._stack:
                break
            value = self._next()
        self._skip()
        if self._at < len(self._text):
            raise self._error("more follows the value")
        return value

    def _next(self) -> Any:
        """The next whole value: a plain one, or an empty container. Opens the containers before it."""
        while True:
            char = self._peek()
            if char == '"':
                return self._string()
            if char not in "{[":
                return self._plain(char)
            self._at += 1
            if len(self._stack) >= DEEPEST:
                raise self._error(f"nested more than {DEEPEST} levels deep")
            if char == "{":
                if self._peek() == "}":
                    self._at += 1
                    return {}
                self._stack.append(({}, self._key()))
            else:
                if self._peek() == "]":
                    self._at += 1
                    return []
                self._stack.append((self._numbers(), ""))

    def _numbers(self) -> list[Any]:
        """The beginning of a list as far as it is a row of numbers: read at once, but not more than a run."""
        numbers: list[Any] = []
        while True:
            run = _RUN.match(self._text, self._at, self._at + RUN_CHARS)
            assert run is not None  # it matches nothing at all, too
            end = run[0].rfind(",")
            if end < 0:
                return numbers
            try:
                more = json.loads(f"[{run[0][:end]}]")
            except ValueError:
                more = []
            if not more:
                return numbers  # read one by one, what is wrong is found where it is
            numbers += more
            self._at += end + 1

    def _closes(self, container: dict[str, Any] | list[Any]) -> bool:
        """Read what follows a value in a container: its end, or a comma and, in an object, the next key."""
        char = self._peek()
        self._at += 1
        if char == ("}" if isinstance(container, dict) else "]"):
            return True
        if char != ",":
            self._at -= 1
            raise self._error("a comma or the end of the container is missing")
        if isinstance(container, dict):
            self._stack[-1] = container, self._key()
        return False

    def _key(self) -> str:
        if self._peek() != '"':
            raise self._error("a key is missing")
        key = self._string()
        if self._peek() != ":":
            raise self._error("a colon is missing")
        self._at += 1
        return key

    def _string(self) -> str:
        start = self._at
        text: str
        text, self._at = scanstring(self._text, start + 1, True)
        if _SURROGATE.search(text):
            self._at = start
            raise self._error("half of a surrogate pair")
        return text

    def _plain(self, char: str) -> Any:
        if char in _WORDS:
            word, value = _WORDS[char]
            if self._text.startswith(word, self._at):
                self._at += len(word)
                return value
        found = _NUMBER.match(self._text, self._at)
        if found is None or not found[0]:
            raise self._error("a value is missing")
        if found[1] or found[2]:
            number: int | float = float(found[0])
        elif len(found[0]) > _MOST_DIGITS:
            raise self._error("a number with too many digits")
        else:
            number = int(found[0])
        self._at = found.end()
        return number

    def _peek(self) -> str:
        """The next character that is no space."""
        self._skip()
        if self._at >= len(self._text):
            raise self._error("the text ends too early")
        return self._text[self._at]

    def _skip(self) -> None:
        spaces = _SPACES.match(self._text, self._at)
        assert spaces is not None
        self._at = spaces.end()

    def _error(self, reason: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(f"{reason} at character {self._at}", "", 0)
