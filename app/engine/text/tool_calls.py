"""Finds tool calls in an answer that streams, in the format of the model's family.

Markup never shows: text that may become a call is held back until it is one, or is none. So the same calls and the
same text come out however the answer is cut. What begins like a call but is none, or calls a tool that nobody
offered, comes out as the text it is.
"""

from __future__ import annotations

import re

from app.engine.text.calls import deepseek, gemma4, harmony_call, invoke, mistral, plain_json, tagged
from app.engine.text.calls.base import CallArguments, CallBegin, CallFormat, NoCall, Taken, Tools
from app.engine.text.calls.readers import Reader, State
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

#: What comes out: text, or steps of calls.
Told = str | CallBegin | CallArguments
#: Characters within which a call has told its name, if it tells it first.
_LONGEST_HEAD = 512
#: The last characters of calls: only with one of them can a call have become whole.
_ENDS = frozenset("}]>`;")
#: What may stand behind the arguments of a call in a list that was cut short: the call's end, and that of the list or
#: the beginning of another call up to its arguments.
_CUT_LIST = re.compile(r"\s*(?:\}\s*)?(?:\][\s}]*|[,;]\s*(?:\{[^{}\[\]]*)?)?")


def call_format_of(template_source: str) -> CallFormat:
    """The family of a template that shows tools."""
    return next((f for f in FORMATS if any(sign in template_source for sign in f.signs)), GENERIC)


class CallParser:
    """`push` text of the content, `push_call` text that the reasoning parser knows to be calls; then `finish`.

    What comes out are pieces of text, beginnings of calls and their arguments, in order. A call begins when its tool is
    one that was offered and its arguments begin; from then on it is a call, whatever follows. `most` bounds the calls;
    those above it are swallowed, and so is the text behind them.
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
        self._reader: Reader | None = None  # reads the arguments of a call that has begun
        self._at = 0  # how far of what is held was read; 0: no call has begun
        self._n_begun = 0  # calls at the head of what is held that are told already

    def push(self, text: str) -> list[Told]:
        out: list[Told] = []
        self._held += text
        if self._inside and self._reader is None and not self._may_change(text):
            return out
        while self._held and self._step(out, is_final=False):
            pass
        return out

    def push_call(self, text: str) -> list[Told]:
        """Take text of a call without an opening of its own."""
        self._inside = True
        return self.push(text)

    def finish(self) -> list[Told]:
        out: list[Told] = []
        while self._held and self._step(out, is_final=True):
            pass
        self._say(out, self._held)
        self._held = ""
        if self._spaces and not self.n_calls:
            out.append(self._spaces)
        return out

    def _step(self, out: list[Told], *, is_final: bool) -> bool:
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

    def _may_change(self, text: str) -> bool:
        """Whether new text within a call that has not begun can make a difference."""
        return len(self._held) < _LONGEST_HEAD or not _ENDS.isdisjoint(text)

    def _step_inside(self, out: list[Told], is_final: bool) -> bool:
        self._begin(out)
        if self._reader is not None and not self._read(out, is_final):
            return False
        if not self._inside:
            return True
        if self._at and self._family.tail is None:
            self._begin(out)
            if self._reader is not None:
                return True
        return self._end(out, is_final)

    def _begin(self, out: list[Told]) -> None:
        """Tell of a call whose name is known."""
        begin = self._family.begin
        is_enough = self._left is not None and self.n_calls >= self._left
        if begin is None or is_enough or self._reader is not None or (self._at and self._family.tail is not None):
            return
        begun = begin(self._held, self._at, self._tools)
        if begun is None:
            return
        self._reader, self._at = begun.reader, begun.at
        self._spaces = ""
        self.n_calls += 1
        self._n_begun += 1
        out.append(CallBegin(begun.name, begun.id))

    def _read(self, out: list[Told], is_final: bool) -> bool:
        """Tell of arguments; whether there may be more to decide."""
        assert self._reader is not None
        text, self._at, state = self._reader.read(self._held, self._at)
        if text:
            out.append(CallArguments(text))
        if state is State.MORE and not is_final:
            return False
        self._reader = None
        if state is State.BROKEN:
            self._leave(self._at)
        elif state is State.MORE:
            self._leave(len(self._held))  # the beginning of some markup, cut short
        return True

    def _end(self, out: list[Told], is_final: bool) -> bool:
        """Find the end of what is held that is calls; whether there may be more to decide."""
        if self._at and self._family.tail is not None:
            end = self._family.tail(self._held, self._at, is_final)
            if end is None:
                return False
            self._leave(end)
            return True
        try:
            taken = self._family.take(self._held, self._tools, is_final)
        except NoCall:
            if is_final and self._at and _CUT_LIST.fullmatch(self._held, self._at):
                self._leave(len(self._held))  # what would have led to another call, cut short
            else:
                self._say_opening(out)
            return True
        if taken is None:
            return False
        self._take(out, taken)
        return True

    def _say_opening(self, out: list[Told]) -> None:
        """What began like a call is text, as far as it was not told as one."""
        if self._at:
            self._leave(self._at)
            return
        width = max((len(tag) for tag in self._openings() if self._held.startswith(tag)), default=len(self._held))
        self._say(out, self._held[:width])
        self._leave(width)

    def _take(self, out: list[Told], taken: Taken) -> None:
        new = taken.calls[self._n_begun :]
        self._leave(taken.n_chars)
        self._spaces = ""
        for call in new:
            if self._left is None or self.n_calls < self._left:
                self.n_calls += 1
                out += [CallBegin(call.name), CallArguments(call.arguments)]

    def _leave(self, at: int) -> None:
        """Go on at `at`, outside of calls."""
        self._held = self._held[at:]
        self._inside, self._reader, self._at, self._n_begun = False, None, 0, 0

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

    def _say(self, out: list[Told], text: str) -> None:
        """Let text out, but for white space at its end. Once enough was called, nothing is left to say."""
        if self._left and self.n_calls >= self._left:
            return
        body = text.rstrip()
        if body:
            out.append(self._spaces + body)
            self._spaces = ""
            self._has_text = True
        self._spaces += text[len(body) :]
