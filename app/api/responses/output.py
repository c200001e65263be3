"""Builds the output of a response from the pieces of an answer, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.api.choice import CallPiece, Piece
from app.api.logprobs import chat_entries
from app.api.responses.items import CustomItem, Event, FunctionItem, Item, MessageItem, SummaryItem, ThoughtItem
from app.api.responses.tools import Toolset
from app.engine.request import TokenInfo

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer


class Output:
    """The items so far. Events carry the place and the id of their item; numbers are given by who sends them.

    `n_top` None: no log probabilities. `summarised`: thoughts are told as their own summary.
    """

    def __init__(self, tools: Toolset, tokenizer: Tokenizer, *, n_top: int | None, summarised: bool) -> None:
        self.items: list[Item] = []
        self._tools = tools
        self._tokenizer = tokenizer
        self._n_top = n_top
        self._thought: type[SummaryItem | ThoughtItem] = SummaryItem if summarised else ThoughtItem
        self._open: Item | None = None

    def push(self, pieces: Sequence[Piece], tokens: Sequence[TokenInfo] = ()) -> list[Event]:
        """Take what is sure by now, and the tokens it came from."""
        events: list[Event] = []
        for i, piece in enumerate(pieces):
            logprobs = self._logprobs(tokens) if i == len(pieces) - 1 else []
            if isinstance(piece, CallPiece):
                events += self._call(piece)
            elif piece[1]:
                kind: type[SummaryItem | ThoughtItem | MessageItem]
                kind = self._thought if piece[0] == "reasoning_content" else MessageItem
                if type(self._open) is not kind:
                    events += self._enter(kind())
                events += self._placed(self._current().add(piece[1], logprobs))
        return events

    def end(self, *, is_whole: bool = True) -> list[Event]:
        """The answer is over. One without anything has an empty message; one that broke off has its last item cut."""
        events: list[Event] = []
        if not self.items:
            events += self._enter(MessageItem())
        return events + self._leave("completed" if is_whole else "incomplete")

    def told(self) -> list[dict[str, Any]]:
        """The items as answers have them."""
        return [dict(item.told) for item in self.items]

    def _call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.name is not None:
            face = self._tools.face(piece.name)
            item = CustomItem if face.is_custom else FunctionItem
            events += self._enter(item(face, piece.id or ""))
        if piece.arguments:
            events += self._placed(self._current().add(piece.arguments, []))
        return events

    def _enter(self, item: Item) -> list[Event]:
        events = self._leave("completed")
        self.items.append(item)
        self._open = item
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item.told)}
        return [*events, added, *self._placed(item.opening())]

    def _leave(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        events = self._placed(item.closing())
        self._open = None
        item.told["status"] = status
        index = len(self.items) - 1
        return [*events, {"type": "response.output_item.done", "output_index": index, "item": dict(item.told)}]

    def _current(self) -> Item:
        assert self._open is not None
        return self._open

    def _placed(self, events: Sequence[Event]) -> list[Event]:
        place = {"output_index": len(self.items) - 1, "item_id": self.items[-1].told["id"]}
        return [{**event, **place} for event in events]

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
        return [] if self._n_top is None else chat_entries(tokens, self._n_top, self._tokenizer)
