"""Makes a response, whole or as a stream of numbered events, and keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.api.choice import Choice
from app.api.context import Api
from app.api.errors import Cancelled
from app.api.generation import Running
from app.api.journal import note
from app.api.responses.answer import Frame
from app.api.responses.items import Event
from app.api.responses.output import Output
from app.api.responses.store import ResponseStore, Stored
from app.api.schemas.responses import InputItem
from app.api.shape import Shape
from app.api.stream import Emit, EventStream
from app.api.understood import Understood
from app.engine.request import Delta, Finished, Started
from app.engine.service import GenerationStream


class Making:
    """One response in the making. `stored` None: it is not kept."""

    def __init__(
        self, frame: Frame, asked: Understood, output: Output, store: ResponseStore, stored: Stored | None
    ) -> None:
        self._frame = frame
        self._asked = asked
        self._output = output
        self._store = store
        self._stored = stored
        self._n_events = 0
        if stored is not None:
            store.add(stored)

    async def whole(self, running: Running, shape: Shape) -> dict[str, Any]:
        """The finished response."""
        try:
            (choice,) = await running.each(self._collect)
        except Exception as error:
            self._fail(error)
            raise
        note(shape, [choice])
        return self._finish(choice)

    async def _collect(self, _: int, stream: GenerationStream) -> Choice:
        choice = self._asked.new_choice()
        async for event in stream:
            self._step(choice, event)
        return choice

    def _step(self, choice: Choice, event: object) -> list[Event]:
        match event:
            case Delta():
                return self._output.push(choice.push(event), event.tokens)
            case Started():
                choice.start(event)
            case Finished():
                rest = self._output.push(choice.end(event))
                return rest + self._output.end(is_whole=choice.finish_reason != "length")
        return []

    def stream(self, running: Running, shape: Shape, api: Api) -> EventStream:
        """All events of the response, the last of which tells all of it."""

        async def produce(emit: Emit) -> None:
            opening = self._frame.response("in_progress", [])
            kinds = ("response.created", "response.in_progress")
            await emit(self._encoded([{"type": kind, "response": opening} for kind in kinds]))

            async def one(_: int, stream: GenerationStream) -> Choice:
                choice = self._asked.new_choice()
                async for event in stream:
                    if events := self._step(choice, event):
                        await emit(self._encoded(events))
                return choice

            (choice,) = await running.each(one)
            note(shape, [choice])
            response = self._finish(choice)
            await emit(self._encoded([{"type": f"response.{response['status']}", "response": response}]))

        def tell_error(error: Exception) -> bytes:
            events = self._output.end(is_whole=False) if self._output.items else []
            return self._encoded([*events, {"type": "response.failed", "response": self._fail(error)}])

        def on_end() -> None:
            running.close()
            self.abandon()

        return EventStream(produce, on_end=on_end, keepalive_s=api.options.keepalive_s, tell_error=tell_error)

    def _encoded(self, events: Sequence[Event]) -> bytes:
        """Events in order, each with its number."""
        texts = []
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._n_events, **event}
            self._n_events += 1
            data = json.dumps(numbered, ensure_ascii=False, separators=(",", ":"))
            texts.append(f"event: {event['type']}\ndata: {data}\n\n")
        return "".join(texts).encode()

    def _finish(self, choice: Choice) -> dict[str, Any]:
        is_whole = choice.finish_reason != "length"
        response = self._frame.response(
            "completed" if is_whole else "incomplete",
            self._output.told(),
            choice=choice,
            incomplete_reason=None if is_whole else "max_output_tokens",
        )
        self._keep(response)
        return response

    def _fail(self, error: Exception) -> dict[str, Any]:
        status = "cancelled" if isinstance(error, Cancelled) else "failed"
        response = self._frame.response(status, self._output.told(), error=error)
        self._keep(response)
        return response

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        if self._stored is not None and self._stored.answer["status"] == "in_progress":
            self._keep(self._frame.response("cancelled", self._output.told()))

    def _keep(self, response: dict[str, Any]) -> None:
        if self._stored is not None:
            made = [InputItem.model_validate(item) for item in response["output"]]
            self._store.update(self._stored, response, made)
