"""Keeps what users write from becoming control tokens when a rendered prompt is tokenized with its special tokens.

A mark that no text holds is put into every place where a user's text spells a control token. Templates carry it along
like any character; the tokenizer finds no token there, and drops the mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from app.engine.text.partition import Partition, SpecialToken

#: Two noncharacters, which Unicode keeps free for use inside a program.
GUARD = "\ufdd2\ufdd3"

#: Roles whose words come from outside. The others are the operator's and the model's own.
_OUTSIDE = frozenset({"user", "tool", "function", "ipython"})


class Guard:
    """Knows the texts of one vocabulary's control tokens."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        self._texts = [text for text in control_texts if len(text) > 1]

    @cached_property
    def _partition(self) -> Partition:
        return Partition([SpecialToken(i, text) for i, text in enumerate(self._texts)])

    def protect(self, text: str) -> str:
        """`text` with a mark inside everything that spells a control token."""
        return "".join(
            fragment if isinstance(fragment, str) else self._broken(self._texts[fragment])
            for fragment in self._partition.split(text.replace(GUARD, ""))
        )

    def protect_messages(self, messages: Iterable[dict[str, Any]]) -> None:
        """Protect the contents of messages from outside, in place.

        Templates may put the parts of a content, or the contents of messages, one behind the other without anything
        between, and trim them: where the texts so far end as a control token begins, the next words get a mark.
        """
        tail = ""
        for message in messages:
            if message.get("role") in _OUTSIDE:
                message["content"], tail = self._protected(message.get("content"), tail)
            else:
                tail = ""

    def _protected(self, content: Any, tail: str) -> tuple[Any, str]:
        """`content` protected behind texts that end in `tail`, and what they end in now."""
        if isinstance(content, str):
            return self._protected_text(content, tail)
        if isinstance(content, list):
            parts = []
            for part in content:
                guarded, tail = self._protected(part, tail)
                parts.append(guarded)
            return parts, tail
        if isinstance(content, dict):
            return self._protected_dict(content, tail)
        return content, tail

    def _protected_dict(self, content: dict[str, Any], tail: str) -> tuple[dict[str, Any], str]:
        """A part's type is a word for the template, not a text that it prints."""
        guarded = {}
        for key, value in content.items():
            if key == "type":
                guarded[key] = value
            else:
                guarded[key], tail = self._protected(value, tail)
        return guarded, tail

    def _protected_text(self, text: str, tail: str) -> tuple[str, str]:
        guarded = self.protect(text)
        words = guarded.lstrip()
        if words and self._begins_token(tail):
            guarded = guarded[: -len(words)] + GUARD + words
        return guarded, (tail + text).rstrip()[-self._longest :] if self._texts else ""

    def _begins_token(self, tail: str) -> bool:
        """Whether a text ends in the first characters of a control token."""
        return any(tail[-n:] in self._beginnings for n in range(1, len(tail) + 1))

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._texts for n in range(1, len(text)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._texts))

    def _broken(self, token: str) -> str:
        return f"{token[0]}{GUARD}{token[1:]}"


def without_marks(text: str) -> str:
    """A guarded prompt as people should see it."""
    return text.replace(GUARD, "")
