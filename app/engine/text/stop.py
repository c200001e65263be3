"""Stop strings in a text that arrives in pieces.

All stops are searched at once by an automaton (Aho and Corasick, 1975): one step per character, whatever the number of
stops and however the text is cut. Its depth says how much of the tail may still become a stop and must wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may leave, and the stop string that ended it, if one did. The stop is not part of the text."""

    text: str
    matched: str | None = None


@dataclass(slots=True)
class _State:
    """A beginning of some stop. `shorter` is the longest other one that ends it; `stop` is set when it is whole."""

    depth: int
    following: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None
    stop: str | None = None


class StopMatcher:
    """Finds the stop whose end comes first; of several that end together, the longest. Empty stops are ignored."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._root = _automaton([stop for stop in stops if stop])
        self._state = self._root
        self._held = ""
        self._done = False

    @property
    def is_idle(self) -> bool:
        """There is nothing to find: every text may leave as it is."""
        return not self._root.following

    def push(self, text: str) -> StopResult:
        """Take more text. After a match everything else is swallowed."""
        if self._done:
            return StopResult("")
        if not self._root.following:
            return StopResult(text)
        held = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            state = self._state = self._step(self._state, char)
            if state.stop is not None:
                self._done, self._held = True, ""
                return StopResult(held[: at - len(state.stop)], state.stop)
        keep = len(held) - self._state.depth
        self._held = held[keep:]
        return StopResult(held[:keep])

    def flush(self) -> str:
        """The text that waited, at the end of the answer."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _step(self, state: _State, char: str) -> _State:
        while True:
            found = state.following.get(char)
            if found is not None:
                return found
            if state.shorter is None:
                return state
            state = state.shorter


def _automaton(stops: list[str]) -> _State:
    root = _State(0)
    for stop in stops:
        state = root
        for char in stop:
            state = state.following.setdefault(char, _State(state.depth + 1))
        state.stop = stop
    waiting = deque((char, state, root) for char, state in root.following.items())
    while waiting:
        char, state, parent = waiting.popleft()
        link = parent.shorter
        while link is not None and char not in link.following:
            link = link.shorter
        state.shorter = root if link is None else link.following[char]
        state.stop = state.stop or state.shorter.stop
        waiting.extend((below, child, state) for below, child in state.following.items())
    return root
