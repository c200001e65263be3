"""Responses that are kept, so that later ones can follow them. Bounded in number and in bytes; the least recently used
go first.

A response holds on to the one it follows, whose steps are part of its own conversation. So one that was forgotten, or
deleted, takes its bytes with it only when nothing that follows it is left.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.api.schemas.responses import InputItem
from app.errors import InvalidParameter, NotFound


@dataclass(slots=True, eq=False)
class Stored:
    """One response. `answer` is told as it is; `given` and `made` are the steps before and in it.

    `n_users`: the store, while it is known, and each response that follows it.
    """

    id: str
    answer: dict[str, Any]
    given: tuple[InputItem, ...]
    parent: Stored | None
    made: tuple[InputItem, ...] = ()
    size_bytes: int = 0
    n_users: int = 0

    def lineage(self) -> list[Stored]:
        """This response and all it follows, the first one first."""
        line: list[Stored] = []
        one: Stored | None = self
        while one is not None:
            line.append(one)
            one = one.parent
        return line[::-1]

    def conversation(self) -> list[InputItem]:
        """Every step up to the end of this response."""
        return [item for one in self.lineage() for item in (*one.given, *one.made)]


class ResponseStore:
    """Not thread-safe: it belongs to the event loop."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._known: OrderedDict[str, Stored] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, stored: Stored) -> None:
        """Keep a response, and forget others if need be, perhaps itself."""
        self._known[stored.id] = stored
        stored.n_users += 1
        if stored.parent is not None:
            stored.parent.n_users += 1
        self.update(stored)

    def update(self, stored: Stored, answer: dict[str, Any] | None = None, made: Sequence[InputItem] = ()) -> None:
        """Take what has become of a response, if it is still known."""
        if answer is not None:
            stored.answer, stored.made = answer, tuple(made)
        if stored.n_users:
            before, stored.size_bytes = stored.size_bytes, _size_bytes(stored)
            self.size_bytes += stored.size_bytes - before
            self._shrink()

    def get(self, response_id: str) -> Stored:
        """Raises NotFound. A response that is looked at counts as used, and so do those it follows."""
        stored = self._known.get(response_id)
        if stored is None:
            raise NotFound(
                f"no response {response_id[:80]!r} is stored here: it was never stored, deleted, or given up for newer "
                f"ones",
                param="response_id",
                code="response_not_found",
            )
        for one in stored.lineage():
            if one.id in self._known:
                self._known.move_to_end(one.id)
        return stored

    def previous(self, response_id: str) -> Stored:
        """The response to follow. Raises InvalidParameter."""
        try:
            stored = self.get(response_id)
        except NotFound as error:
            raise InvalidParameter(
                f"{error}; send the whole conversation as input instead",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        if stored.answer["status"] not in ("completed", "incomplete"):
            raise InvalidParameter(
                f"the response {response_id!r} is {stored.answer['status']}, so nothing can follow it",
                param="previous_response_id",
                code="previous_response_not_complete",
            )
        return stored

    def item(self, item_id: str) -> InputItem | None:
        """A step of any known response, the newest first."""
        for stored in reversed(self._known.values()):
            for item in (*stored.made, *stored.given):
                if item.id == item_id:
                    return item
        return None

    def remove(self, response_id: str) -> None:
        """Forget a response. Raises NotFound."""
        self._forget(self.get(response_id).id)

    def _shrink(self) -> None:
        while self._known and (len(self._known) > self._most or self.size_bytes > self._most_bytes):
            self._forget(next(iter(self._known)))

    def _forget(self, response_id: str) -> None:
        one: Stored | None = self._known.pop(response_id)
        while one is not None:
            one.n_users -= 1
            if one.n_users:
                return
            self.size_bytes -= one.size_bytes
            one = one.parent


def _size_bytes(stored: Stored) -> int:
    """What a response takes, roughly: its steps and its answer as JSON."""
    items = sum(len(item.model_dump_json(exclude_none=True)) for item in (*stored.given, *stored.made))
    return items + len(json.dumps(stored.answer, ensure_ascii=False))
