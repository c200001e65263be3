"""Cuts text at special tokens, so that models see only what lies between them.

The rule of the format: longer tokens first; each takes all its occurrences in what is still raw, left to right. That
costs one search per token. Where no token can begin inside a shorter one, the longest match at each position gives the
same answer in one pass; vocabularies are looked at once for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: A piece of text, or the id of a special token.
Fragment = str | int


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is matched as text. The flags tell whether it eats white space before and after it."""

    id: int
    text: str
    eats_before: bool = False
    eats_after: bool = False


class Partition:
    """Splits texts at one set of special tokens."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        ordered = sorted(tokens, key=lambda token: -_stored_bytes(token.text))
        self._by_text: Mapping[str, SpecialToken] = {token.text: token for token in ordered}
        self._eaters = any(token.eats_before or token.eats_after for token in ordered)
        self._scan = _searches(ordered) if _interleaves(ordered) else _one_pass(ordered)

    def split(self, text: str) -> list[Fragment]:
        """Raw texts and token ids in order. No raw text is empty."""
        spans = self._scan(text) if self._by_text else []
        fragments: list[Fragment] = []
        at = 0
        eat = False
        for start, end in spans:
            token = self._by_text[text[start:end]]
            self._add_raw(fragments, text[at:start], eat, token.eats_before)
            fragments.append(token.id)
            at, eat = end, token.eats_after
        self._add_raw(fragments, text[at:], eat, False)
        return fragments

    def _add_raw(self, fragments: list[Fragment], raw: str, eat_head: bool, eat_tail: bool) -> None:
        if self._eaters:
            raw = raw.lstrip() if eat_head else raw
            raw = raw.rstrip() if eat_tail else raw
        if raw:
            fragments.append(raw)


Span = tuple[int, int]
Scan = Callable[[str], Sequence[Span]]


def _stored_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _interleaves(tokens: Sequence[SpecialToken]) -> bool:
    """Whether some token can begin inside a shorter one and go on behind it. Runs of one character do no harm."""
    longest: dict[str, int] = {}  # beginning of a token -> bytes of the longest such token
    longest_run: dict[str, int] = {}
    for token in tokens:
        size = _stored_bytes(token.text)
        if _is_run(token.text):
            longest_run[token.text[0]] = max(size, longest_run.get(token.text[0], 0))
            continue
        for n in range(1, len(token.text)):
            longest[token.text[:n]] = max(size, longest.get(token.text[:n], 0))
    for token in tokens:
        size, is_run = _stored_bytes(token.text), _is_run(token.text)
        for n in range(1, len(token.text)):
            tail = token.text[n:]
            meets_run = not is_run and _is_run(tail) and longest_run.get(tail[0], 0) > size
            if meets_run or longest.get(tail, 0) > size:
                return True
    return False


def _is_run(text: str) -> bool:
    return text.count(text[0]) == len(text)


def _one_pass(tokens: Sequence[SpecialToken]) -> Scan:
    if not tokens:
        return lambda text: []
    try:
        pattern = re.compile(_trie_pattern([token.text for token in tokens]))
    except RecursionError:  # hundreds of tokens, each the beginning of the next
        return _searches(tokens)
    return lambda text: [match.span() for match in pattern.finditer(text)]


def _searches(tokens: Sequence[SpecialToken]) -> Scan:
    """The rule, word by word."""

    def scan(text: str) -> list[Span]:
        taken: list[Span] = []
        raw: list[Span] = [(0, len(text))]
        for token in tokens:
            if token.text not in text:
                continue
            left: list[Span] = []
            for start, end in raw:
                for hit in _occurrences(text, token.text, start, end):
                    left.append((start, hit))
                    start = hit + len(token.text)
                    taken.append((hit, start))
                left.append((start, end))
            raw = [(start, end) for start, end in left if start < end]
        return sorted(taken)

    return scan


def _occurrences(text: str, token: str, start: int, end: int) -> Iterator[int]:
    while (hit := text.find(token, start, end)) >= 0:
        yield hit
        start = hit + len(token)


def _trie_pattern(texts: Sequence[str]) -> str:
    """A regular expression that matches the longest of `texts` at a position, sharing common beginnings.

    A plain alternation of thousands of texts would be tried one by one at every position.
    """
    root: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern_of(root)


def _pattern_of(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """Chains are walked in a loop, so that depth grows with branches alone."""
    chain = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        chain += re.escape(char)
    branches = [re.escape(char) + _pattern_of(below) for char, below in node.items() if char]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
