"""Where the turns of a conversation begin in a prompt, by the special tokens that open them.

A prompt may be cut there: what a later prompt shares with it is whole turns, so that is where states are worth keeping.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.errors import RequestError

#: Words that no template writes by itself, one per turn.
_WORDS = ("zqfirst", "zqanswer", "zqsecond")


class TurnMarks:
    """The opening tokens of one template in one vocabulary; none where turns begin with plain text."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._openers = frozenset(_openers(template, tokenizer))

    def starts(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Positions in a prompt at which a turn begins, in order. The very beginning is none."""
        return tuple(at for at, token in enumerate(tokens) if at and token in self._openers)


def _openers(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    first, answer, second = _WORDS
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]
    try:
        text = template.render(messages)
    except RequestError:
        return []
    found = []
    for before, after in ((first, answer), (answer, second)):
        start, end = text.find(before), text.find(after)
        if not 0 <= start < end:
            continue
        between = tokenizer.fragments(text[start + len(before) : end], parse_special=True)
        specials = [fragment for fragment in between if isinstance(fragment, int)]
        # Of two or more, the first closes the turn before.
        found += specials[1:2] or specials[:1]
    return found
