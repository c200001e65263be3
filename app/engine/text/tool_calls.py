"""Finds tool calls in an answer that streams, in the format of the model's family.

Markup never shows: text that may become a call is held back until it is one, or is none. So the same calls and the
same text come out however the answer is cut. What begins like a call but is none, or calls a tool that nobody
offered, comes out as the text it is.
"""

from __future__ import annotations

from app.engine.text.calls import deepseek, gemma4, harmony_call, invoke, mistral, plain_json, tagged
from app.engine.text.calls.base import Call, CallFormat, NoCall, Taken, Tools
from app.engine.text.fields import first_of, partial_tail

#: In the order in which templates are looked at: the special ones first.
FORMATS: tuple[CallFormat, ...] = (
    harmony_call.FORMAT,
    gemma4.FORMAT,
    invoke.DSML,
    invoke.MINIMAX,
    deepseek.DEEPSEEK,
    deepseek.KIMI,
    mistral.FORMAT,
    tagged.FORMAT,
    plain_json.LLAMA3,
)
GENERIC = plain_json.GENERIC

#: The last characters of calls: only with one of them can a call have become whole.
_ENDS = frozenset("}]>`;")


def call_format_of(template_source: str) -> CallFormat:
    """The family of a template that shows tools."""
    return next((f for f in FORMATS if any(sign in template_source for sign in f.signs)), GENERIC)


class CallParser:
    """`push` text of the content, `push_call` text that the reasoning parser knows to be calls; then `finish`.

    What comes out are pieces of text and calls, in order. `most` bounds the calls; those above it are swallowed.
    """

    def __init__(self, family: CallFormat, tools: Tools, *, most: int | None = None) -> None:
        self._family = family
        self.id_chars = family.id_chars
        self._tools = tools
        self._left = most
        self._held = ""  # undecided text
        self._spaces = ""  # white space that is dropped when a call follows it
        self._inside = False  # what is held begins with an opening
        self._has_text = False
        self.n_calls = 0

    def push(self, text: str) -> list[str | Call]:
        out: list[str | Call] = []
        if self._inside and _ENDS.isdisjoint(text):
            self._held += text
            return out
        self._held += text
        while self._held and self._step(out, is_final=False):
            pass
        return out

    def push_call(self, text: str) -> list[str | Call]:
        """Take text of a call without an opening of its own."""
        self._inside = True
        return self.push(text)

    def finish(self) -> list[str | Call]:
        out: list[str | Call] = []
        while self._held and self._step(out, is_final=True):
            pass
        self._say(out, self._held)
        self._held = ""
        if self._spaces and not self.n_calls:
            out.append(self._spaces)
        return out

    def _step(self, out: list[str | Call], *, is_final: bool) -> bool:
        """Decide about the head of what is held; whether there may be more to decide."""
        if self._inside:
            return self._step_inside(out, is_final)
        at, width = self._opening()
        if width:
            self._say(out, self._held[:at])
            self._held, self._inside = self._held[at:], True
            return True
        keep = 0 if is_final else self._undecided()
        self._say(out, self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _step_inside(self, out: list[str | Call], is_final: bool) -> bool:
        try:
            taken = self._family.take(self._held, self._tools, is_final)
        except NoCall:
            self._inside = False
            width = max((len(tag) for tag in self._openings() if self._held.startswith(tag)), default=len(self._held))
            self._say(out, self._held[:width])
            self._held = self._held[width:]
            return True
        if taken is None:
            return False
        self._inside = False
        self._take(out, taken)
        return True

    def _take(self, out: list[str | Call], taken: Taken) -> None:
        self._held = self._held[taken.n_chars :]
        self._spaces = ""
        for call in taken.calls:
            if self._left is None or self.n_calls < self._left:
                self.n_calls += 1
                out.append(call)

    def _openings(self) -> tuple[str, ...]:
        return (*self._family.openings, *(() if self._has_text else self._family.heads))

    def _opening(self) -> tuple[int, int]:
        """Where a call begins in what is held, and the length of its opening; 0 if none does."""
        at, tag = first_of(self._held, self._family.openings)
        if not self._has_text:
            rest = self._held.lstrip()
            head = next((tag for tag in self._family.heads if rest.startswith(tag)), None)
            if head is not None and (tag is None or len(self._held) - len(rest) <= at):
                return len(self._held) - len(rest), len(head)
        return at, 0 if tag is None else len(tag)

    def _undecided(self) -> int:
        """Characters at the end of what is held that may become an opening."""
        tags = self._family.openings
        keep = partial_tail(self._held, tags) if tags else 0
        rest = self._held.lstrip()
        if not self._has_text and rest and any(tag.startswith(rest) for tag in self._family.heads):
            return max(keep, len(rest))
        return keep

    def _say(self, out: list[str | Call], text: str) -> None:
        """Let text out, but for white space at its end. Once enough was called, nothing is left to say."""
        if self._left is not None and self.n_calls >= self._left:
            return
        body = text.rstrip()
        if body:
            out.append(self._spaces + body)
            self._spaces = ""
            self._has_text = True
        self._spaces += text[len(body) :]
