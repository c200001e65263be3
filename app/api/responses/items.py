"""The items of a response's output, each as it grows: the events that tell of it, and what it is in the end."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from typing import Any

from app.api.responses.tools import INPUT, Face

#: An event without its number, and without the place and the id of its item.
Event = dict[str, Any]


def new_item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Item(ABC):
    """One item. `told` is how it stands in answers; its text comes into it when it is whole."""

    def __init__(self, prefix: str, kind: str, **fields: Any) -> None:
        self.told: dict[str, Any] = {"id": new_item_id(prefix), "type": kind, "status": "in_progress", **fields}
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def opening(self) -> list[Event]:
        """What comes before any text."""
        return []

    @abstractmethod
    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """More text."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """No more text comes; puts it into `told`."""


class _Parted(Item):
    """An item whose text stands in a part of its own."""

    part_event = "response.content_part"
    text_event = "response.output_text"
    place = {"content_index": 0}
    where = "content"

    def __init__(self, prefix: str, kind: str, **fields: Any) -> None:
        super().__init__(prefix, kind, **fields)
        self.logprobs: list[dict[str, Any]] = []

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """The part as far as it is known."""

    def extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """What events of text carry besides it."""
        return {}

    def opening(self) -> list[Event]:
        return [{"type": f"{self.part_event}.added", **self.place, "part": self.part()}]

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self.parts.append(text)
        self.logprobs += logprobs
        return [{"type": f"{self.text_event}.delta", **self.place, "delta": text, **self.extra(logprobs)}]

    def closing(self) -> list[Event]:
        part = self.part()
        self.told[self.where] = [part]
        return [
            {"type": f"{self.text_event}.done", **self.place, "text": self.text, **self.extra(self.logprobs)},
            {"type": f"{self.part_event}.done", **self.place, "part": part},
        ]


class MessageItem(_Parted):
    """What is meant for the reader."""

    def __init__(self) -> None:
        super().__init__("msg", "message", role="assistant", content=[])

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs}


class ThoughtItem(_Parted):
    """A thought as the model had it."""

    text_event = "response.reasoning_text"

    def __init__(self) -> None:
        super().__init__("rs", "reasoning", summary=[], content=[], encrypted_content=None)

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class SummaryItem(_Parted):
    """A thought for clients that ask for a summary: it is its own."""

    part_event = "response.reasoning_summary_part"
    text_event = "response.reasoning_summary_text"
    place = {"summary_index": 0}
    where = "summary"

    def __init__(self) -> None:
        super().__init__("rs", "reasoning", summary=[], encrypted_content=None)

    def part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self.text}


class FunctionItem(Item):
    """A call of a function."""

    def __init__(self, face: Face, call_id: str) -> None:
        super().__init__("fc", "function_call", **_named(face), call_id=call_id, arguments="")

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self.parts.append(text)
        return [{"type": "response.function_call_arguments.delta", "delta": text}]

    def closing(self) -> list[Event]:
        self.told["arguments"] = self.text
        done = {"name": self.told["name"], "arguments": self.text}
        return [{"type": "response.function_call_arguments.done", **done}]


class CustomItem(Item):
    """A call of a custom tool: of its arguments in JSON, the client gets the text alone."""

    def __init__(self, face: Face, call_id: str) -> None:
        super().__init__("ctc", "custom_tool_call", **_named(face), call_id=call_id, input="")
        self._reader = InputText()

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        return self._tell(self._reader.push(text))

    def _tell(self, text: str) -> list[Event]:
        if not text:
            return []
        self.parts.append(text)
        return [{"type": "response.custom_tool_call_input.delta", "delta": text}]

    def closing(self) -> list[Event]:
        rest = self._tell(self._reader.finish())
        self.told["input"] = self.text
        return [*rest, {"type": "response.custom_tool_call_input.done", "input": self.text}]


def _named(face: Face) -> dict[str, Any]:
    return {"name": face.name} if face.namespace is None else {"name": face.name, "namespace": face.namespace}


class InputText:
    """Reads the text out of a custom tool's arguments, `{"input": "..."}`, while they stream."""

    _HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
    #: Whole characters of a JSON string; half of a surrogate pair waits for the other half.
    _CHARS = re.compile(
        r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
        r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
    )

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._has_text = False

    def push(self, fragment: str) -> str:
        """More of the arguments; the text that is sure by now."""
        self._held += fragment
        if not self._is_inside:
            head = None if self._has_text else self._HEAD.match(self._held)
            if head is None:
                return ""
            self._held, self._is_inside, self._has_text = self._held[head.end() :], True, True
        found = self._CHARS.match(self._held)
        assert found is not None  # the pattern matches nothing at all, too
        chars, self._held = found[0], self._held[found.end() :]
        self._is_inside = not self._held.startswith('"')
        return _unquoted(chars)

    def finish(self) -> str:
        """Text of arguments that do not have the form: of the only string in them, else all of them."""
        if self._has_text:
            return ""
        try:
            value = json.loads(self._held)
        except (ValueError, RecursionError):
            return self._held
        texts = [text for text in value.values() if isinstance(text, str)] if isinstance(value, dict) else []
        return texts[0] if len(texts) == 1 else self._held


def _unquoted(chars: str) -> str:
    text: str = json.loads(f'"{chars}"', strict=False)
    return text
