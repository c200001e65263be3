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
        """Protect the contents of messages from outside, in place."""
        for message in messages:
            if message.get("role") in _OUTSIDE:
                message["content"] = self._protected(message.get("content"))

    def _protected(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.protect(content)
        if isinstance(content, list):
            return [self._protected(part) for part in content]
        if isinstance(content, dict):
            return {key: self._protected(value) for key, value in content.items()}
        return content

    def _broken(self, token: str) -> str:
        return f"{token[0]}{GUARD}{token[1:]}"


def without_marks(text: str) -> str:
    """A guarded prompt as people should see it."""
    return text.replace(GUARD, "")
