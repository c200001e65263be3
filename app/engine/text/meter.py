"""A budget of work for one rendering of a template.

Templates come with model files and are not to be trusted: a loop, a multiplied string or a list that holds itself
twice, again and again, must end by itself. Everything a template does is charged here, in steps; a clock, if there is
one, ends it earlier. No value may be larger than a limit, so memory is bounded too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_CHARS_PER_STEP = 16
_STEPS_PER_LOOK = 4096


class TemplateLimit(Exception):
    """The template asked for more than it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rendering may use. Both grow with the input, so that long conversations have what they need.

    A step is a turn of a loop, a call, a filter, or sixteen characters made. Ten million take a few seconds.
    """

    steps: int = 10_000_000
    steps_per_input_char: int = 4
    value_chars: int = 4_000_000
    value_chars_per_input_char: int = 4
    seconds: float = 5.0


DEFAULT_LIMITS = Limits()


class Meter:
    """Counts the work of one rendering. `clock` gives seconds; without one only the steps count."""

    __slots__ = ("_clock", "_deadline", "_left", "_look_at", "max_chars")

    def __init__(self, limits: Limits, input_chars: int, clock: Callable[[], float] | None = None) -> None:
        self._left = limits.steps + limits.steps_per_input_char * input_chars
        self._look_at = self._left - _STEPS_PER_LOOK
        self._clock = clock
        self._deadline = 0.0 if clock is None else clock() + limits.seconds
        self.max_chars = limits.value_chars + limits.value_chars_per_input_char * input_chars

    def charge(self, steps: int) -> None:
        """Take steps from the budget. Raises TemplateLimit when it or the time is used up."""
        self._left -= steps
        if self._left < self._look_at:
            self._look()

    def chars(self, n_chars: int) -> None:
        """Charge for a text of that length, before it is made where its length is known."""
        if n_chars > self.max_chars:
            raise TemplateLimit(f"it makes a text of {n_chars} characters")
        self.charge(1 + n_chars // _CHARS_PER_STEP)

    def items(self, n_items: int) -> None:
        """The same for a list."""
        if n_items > self.max_chars // _CHARS_PER_STEP:
            raise TemplateLimit(f"it makes a list of {n_items} items")
        self.charge(1 + n_items)

    def made(self, value: Any) -> Any:
        """Charge for a value that was just made, and hand it on; a generator is charged as it goes."""
        if isinstance(value, str):
            self.chars(len(value))
        elif isinstance(value, list | tuple | dict):
            self.items(len(value))
        elif isinstance(value, Iterator):
            return self._metered(value)
        else:
            self.charge(1)
        return value

    def walk(self, value: Any) -> Any:
        """Charge for every node of a nested value, shared ones each time they are met, and hand it on.

        Containers are walked whenever one is put into another, so nothing can grow behind the meter's back.
        """
        open_values = [value]
        while open_values:
            value_here = open_values.pop()
            self.charge(1)
            if isinstance(value_here, str):
                self.charge(len(value_here) // _CHARS_PER_STEP)
            elif isinstance(value_here, dict):
                open_values.extend(value_here.keys())
                open_values.extend(value_here.values())
            elif isinstance(value_here, list | tuple):
                open_values.extend(value_here)
        return value

    def text(self, value: Any) -> str:
        """What a value looks like in the output."""
        if isinstance(value, str):
            self.charge(1 + len(value) // _CHARS_PER_STEP)
            return value
        if isinstance(value, list | tuple | dict):
            self.walk(value)
        text = str(value)
        self.chars(len(text))
        return text

    def _metered(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.charge(1)
            yield value

    def _look(self) -> None:
        if self._left < 0:
            raise TemplateLimit("it does too much work")
        if self._clock is not None and self._clock() > self._deadline:
            raise TemplateLimit("it takes too long")
        self._look_at = self._left - _STEPS_PER_LOOK
