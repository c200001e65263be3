"""The fields of an answer, and how markup is found in text that streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum


class Field(StrEnum):
    """Where a piece of an answer belongs. CALL is the raw text of a tool call that the markup sets apart."""

    CONTENT = "content"
    REASONING = "reasoning_content"
    CALL = "tool_call"


Piece = tuple[Field, str]


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one field as one piece."""
    together: list[Piece] = []
    for field, text in pieces:
        if together and together[-1][0] == field:
            together[-1] = field, together[-1][1] + text
        else:
            together.append((field, text))
    return together


def first_of(text: str, tags: Sequence[str]) -> tuple[int, str | None]:
    """Where the first of these tags begins, and which it is; the longest where several begin together."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    if not found:
        return -1, None
    at, _, tag = min(found)
    return at, tag


def partial_tail(text: str, tags: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a tag."""
    for n_chars in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        tail = text[-n_chars:]
        if any(tag.startswith(tail) for tag in tags):
            return n_chars
    return 0
