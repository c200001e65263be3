"""Submits the choices of a request, all or none, and runs them beside each other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from app.api.disconnect import until_disconnect
from app.engine.request import FinishReason, GenerateRequest
from app.engine.service import GenerationStream, InferenceService

T = TypeVar("T")
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def choice_ids(request_id: str, n: int) -> list[str]:
    """The engine's ids of a request's choices: the first carries the request's own."""
    return [request_id, *(f"{request_id}.{i}" for i in range(1, n))]


@dataclass(frozen=True, slots=True)
class Running:
    """Admitted choices, in order."""

    streams: Sequence[GenerationStream]

    @classmethod
    def submit(cls, service: InferenceService, requests: Sequence[GenerateRequest]) -> Running:
        """Admit all of them or none; raises what the engine says to the first it refuses."""
        streams: list[GenerationStream] = []
        try:
            for request in requests:
                streams.append(service.submit(request))
        except BaseException:
            cls(streams).abort()
            raise
        return cls(streams)

    def abort(self) -> None:
        """Free every slot that is still held."""
        for stream in self.streams:
            stream.abort()

    async def each(self, work: Callable[[int, GenerationStream], Awaitable[T]]) -> list[T]:
        """Run `work` on every stream at once; the first error stops all and is raised."""
        if len(self.streams) == 1:
            return [await work(0, self.streams[0])]
        tasks = [asyncio.ensure_future(work(i, stream)) for i, stream in enumerate(self.streams)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def whole(self, request: Request, answer: Callable[[], Awaitable[Response]]) -> Response:
        """Wait for an answer that is sent at once; the slots are freed if the client does not wait for it."""
        response = Response(status_code=499)  # nobody is there to read it
        try:
            async with until_disconnect(request.receive):
                response = await answer()
        finally:
            self.abort()
        return response
