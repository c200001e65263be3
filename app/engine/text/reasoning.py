"""Splits an answer that streams into thoughts and what is meant for the reader.

Model families mark thoughts with tags of their own; some templates open the thought in the prompt already, so that
only the closing tag is in the answer. Parts of tags are held back until it is clear what they are, so the fields come
out the same however the text is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.engine.text.fields import Field, Piece, first_of, joined, partial_tail
from app.engine.text.harmony import HarmonyParser

#: White space in front of an answer that is held back in case a tag follows.
_MOST_SPACES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How one family marks its thoughts.

    `signs`: texts of which a template of this family has at least one. `call_starts`: a tool call ends a thought even
    where the closing tag was forgotten. `reopens`: a thought may begin behind content (only where the tags are special
    tokens, which no one writes by chance). `more_markers`: other markup that the family's parser reads.
    """

    name: str
    signs: tuple[str, ...]
    opening: str
    closing: str
    call_starts: tuple[str, ...] = ()
    reopens: bool = False
    more_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that must show in the text of an answer, even where they are control tokens."""
        return (self.opening.strip(), self.closing, *self.call_starts, *self.more_markers)


_DSML_CALLS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")

#: In the order in which templates are looked at: the special ones first.
FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        name="harmony",
        signs=("<|channel|>analysis", "<|channel|>final"),
        opening="<|channel|>",
        closing="<|message|>",
        more_markers=("<|start|>", "<|end|>", "<|constrain|>", "<|call|>"),
    ),
    ReasoningFormat(
        name="gemma4",
        signs=("<|channel>",),
        opening="<|channel>thought\n",
        closing="<channel|>",
        call_starts=("<|tool_call>",),
        reopens=True,
    ),
    ReasoningFormat(
        name="mistral",
        signs=("[THINK]",),
        opening="[THINK]",
        closing="[/THINK]",
        call_starts=("[TOOL_CALLS]",),
    ),
    ReasoningFormat(
        name="seed",
        signs=("<seed:think>",),
        opening="<seed:think>",
        closing="</seed:think>",
        call_starts=("<seed:tool_call>",),
    ),
    ReasoningFormat(
        name="command",
        signs=("<|START_THINKING|>",),
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        call_starts=("<|START_ACTION|>",),
        reopens=True,
    ),
    ReasoningFormat(
        name="apertus", signs=("<|inner_prefix|>",), opening="<|inner_prefix|>", closing="<|inner_suffix|>"
    ),
    ReasoningFormat(
        name="apriel",
        signs=("[BEGIN FINAL RESPONSE]",),
        opening="Here are my reasoning steps:\n",
        closing="[BEGIN FINAL RESPONSE]",
    ),
    ReasoningFormat(
        name="think",
        signs=("<think>", "</think>"),
        opening="<think>",
        closing="</think>",
        call_starts=("<tool_call>", "<minimax:tool_call>", "<|tool_calls_section_begin|>", *_DSML_CALLS),
    ),
)


def format_of(template_source: str) -> ReasoningFormat | None:
    """The family of a template, None when it knows no thoughts."""
    return next((family for family in FORMATS if any(sign in template_source for sign in family.signs)), None)


class Parser(Protocol):
    """What every family's parser does."""

    def push(self, text: str) -> list[Piece]:
        """Take more of the answer; the pieces that are certain now, in order."""
        ...

    def finish(self) -> list[Piece]:
        """The rest, at the end of the answer."""
        ...


def reasoning_parser(
    family: ReasoningFormat | None, prompt: str, *, has_tools: bool = False, inside: bool = False
) -> Parser:
    """A parser for the answer to `prompt`, in the state in which the prompt ends.

    `inside`: the client itself began the thought that the answer goes on with.
    """
    if family is None:
        return PlainParser()
    if family.name == "harmony":
        return HarmonyParser(prompt)
    opened = prompt.rstrip().endswith(family.opening.rstrip())
    return TagParser(family, is_open=inside or opened, has_tools=has_tools)


class PlainParser:
    """For families without thoughts: all is content."""

    def push(self, text: str) -> list[Piece]:
        return [(Field.CONTENT, text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class TagParser:
    """For families with an opening and a closing tag. White space around a thought belongs to the markup."""

    def __init__(self, family: ReasoningFormat, *, is_open: bool = False, has_tools: bool = False) -> None:
        self._family = family
        self._ends = (family.closing, *(family.call_starts if has_tools else ()))
        self._held = ""  # undecided text
        self._spaces: list[str] = []  # white space that is dropped if nothing follows it
        self._inside = is_open
        self._has_thought = False  # something of the current thought came out
        self._has_content = False
        self._after_thought = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._step(pieces):
            pass
        return joined(pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._inside:
            self._think(pieces, held)
        else:
            self._say(pieces, held)
        return joined(pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        """Decide about the head of what is held; whether there may be more to decide."""
        if not self._held:
            return False
        if self._inside:
            return self._step_inside(pieces)
        if self._has_content and not self._family.reopens:
            self._say(pieces, self._take(len(self._held)))
            return False
        return self._step_outside(pieces)

    def _step_inside(self, pieces: list[Piece]) -> bool:
        at, tag = first_of(self._held, self._ends)
        if tag is None:
            self._think(pieces, self._take(len(self._held) - partial_tail(self._held, self._ends)))
            return False
        self._think(pieces, self._take(at))
        if tag == self._family.closing:
            self._take(len(tag))
        self._inside, self._has_thought, self._after_thought = False, False, True
        self._spaces.clear()
        return True

    def _step_outside(self, pieces: list[Piece]) -> bool:
        opening = self._family.opening
        rest = self._held.lstrip()
        n_spaces = len(self._held) - len(rest)
        if not self._has_content and opening.startswith(rest) and rest != opening and n_spaces <= _MOST_SPACES:
            return False  # may still become the tag
        if not self._has_content and rest.startswith(opening):
            self._take(n_spaces)
        elif self._family.reopens:
            at, tag = first_of(self._held, (opening,))
            self._say(pieces, self._take(at if tag else len(self._held) - partial_tail(self._held, (opening,))))
        else:
            self._say(pieces, self._take(len(self._held)))
        if not self._held.startswith(opening):
            return False
        self._take(len(opening))
        self._inside = True
        return True

    def _take(self, n_chars: int) -> str:
        taken, self._held = self._held[:n_chars], self._held[n_chars:]
        return taken

    def _think(self, pieces: list[Piece], text: str) -> None:
        if not self._has_thought:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            pieces.append((Field.REASONING, "".join(self._spaces) + body))
            self._spaces.clear()
            self._has_thought = True
        if self._has_thought:
            self._spaces.append(text[len(body) :])

    def _say(self, pieces: list[Piece], text: str) -> None:
        if self._after_thought and not self._has_content:
            text = text.lstrip()
        if text:
            pieces.append((Field.CONTENT, text))
            self._has_content = True
