"""The message format of gpt-oss: an answer is a row of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>the answer

A header may name a recipient (`to=functions.f`); such a message is a call of a tool. The answer begins behind
`<|start|>assistant`, which is the end of the prompt.
"""

from __future__ import annotations

import re

from app.engine.text.fields import Field, Piece, first_of, joined, partial_tail

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)

#: What a header may begin with, and how long it may be. Anything else is an answer that lost its header.
_HEADER_STARTS = (_CHANNEL, _START, _MESSAGE, "<|constrain|>", "<|end|>", "to=", "assistant", "commentary")
_LONGEST_HEADER = 256

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")

#: Between two messages of one field.
_BETWEEN = "\n\n"


class HarmonyParser:
    """Analysis is reasoning, a message to a tool is a call (raw, header and end included), all else is content."""

    def __init__(self, prompt: str) -> None:
        self._held = ""
        self._field: Field | None = None  # of the body we are in; None: in a header
        self._seen: set[Field] = set()  # fields that have come out
        self._is_fresh = True  # nothing of this body has come out
        begun = prompt.rfind(f"{_START}assistant")
        if begun >= 0:
            self.push(prompt[begun + len(_START) + len("assistant") :])
            self._seen.clear()
            self._is_fresh = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._held and (self._header(pieces) if self._field is None else self._body(pieces, self._field)):
            pass
        return joined(pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._field is not None:
            self._emit(pieces, self._field, held)
        elif _CHANNEL not in held and _START not in held:  # else a header that was cut short
            self._emit(pieces, Field.CALL if held.lstrip().startswith("to=") else Field.CONTENT, held)
        return pieces

    def _header(self, pieces: list[Piece]) -> bool:
        at = self._held.find(_MESSAGE)
        header = self._held if at < 0 else self._held[: at + len(_MESSAGE)]
        if not _is_header(header, is_whole=at >= 0):
            self._enter(Field.CONTENT)
            return True
        if at < 0:
            return False
        self._held = self._held[len(header) :]
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] not in ("user", "assistant", "all"):
            self._enter(Field.CALL)
            self._emit(pieces, Field.CALL, header)
        else:
            channels = _CHANNEL_NAME.findall(header)
            self._enter(Field.REASONING if channels[-1:] == ["analysis"] else Field.CONTENT)
        return True

    def _body(self, pieces: list[Piece], field: Field) -> bool:
        at, end = first_of(self._held, _ENDS)
        if end is None:
            n_body = len(self._held) - partial_tail(self._held, _ENDS)
            body, self._held = self._held[:n_body], self._held[n_body:]
            self._emit(pieces, field, body)
            return False
        is_closed = end not in (_START, _CHANNEL)  # else the next header begins
        self._emit(pieces, field, self._held[:at] + (end if is_closed and field == Field.CALL else ""))
        self._held = self._held[at + len(end) * is_closed :]
        self._field = None
        return True

    def _enter(self, field: Field) -> None:
        self._field, self._is_fresh = field, True

    def _emit(self, pieces: list[Piece], field: Field, text: str) -> None:
        if not text:
            return
        if self._is_fresh and field in self._seen and field != Field.CALL:
            text = _BETWEEN + text
        self._is_fresh = False
        self._seen.add(field)
        pieces.append((field, text))


def _is_header(text: str, *, is_whole: bool) -> bool:
    """Whether this is a header, or may still become one."""
    if len(text) > _LONGEST_HEADER:
        return False
    text = text.lstrip()
    return any(text.startswith(start) or (not is_whole and start.startswith(text)) for start in _HEADER_STARTS)
