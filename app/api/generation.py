"""Submits the choices of a request, all or none, and runs them beside each other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from app.api.context import Api
from app.api.disconnect import until_disconnect
from app.api.journal import note_failure
from app.engine.request import GenerateRequest
from app.engine.service import GenerationStream

T = TypeVar("T")


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def choice_ids(request_id: str, n: int, first: int = 0) -> list[str]:
    """The engine's ids of choices `first` to `first + n`: choice 0 carries the request's own."""
    return [f"{request_id}.{i}" if i else request_id for i in range(first, first + n)]


class Running:
    """Admitted choices of one request, in order; known to the app by the request's id until `close`."""

    def __init__(self, api: Api, request_id: str) -> None:
        self._api = api
        self._id = request_id
        self._streams: dict[int, GenerationStream] = {}
        self._unfinished: set[int] = set()

    @classmethod
    def submit(cls, api: Api, request_id: str, requests: Sequence[GenerateRequest]) -> Running:
        """Admit all of them or none; raises what the engine says to the first it refuses."""
        running = cls(api, request_id)
        try:
            for i, request in enumerate(requests):
                running._streams[i] = api.service.submit(request)
                running._unfinished.add(i)
        except BaseException:
            running.close()
            raise
        api.cancels[request_id] = running.abort
        return running

    def abort(self) -> None:
        """Free every slot that is still held."""
        for i in self._unfinished:
            self._streams[i].abort()

    def close(self) -> None:
        """Abort what is not finished, and be forgotten."""
        self.abort()
        self._unfinished.clear()
        self._api.cancels.pop(self._id, None)

    async def each(self, work: Callable[[int, GenerationStream], Awaitable[T]]) -> list[T]:
        """Run `work` on every stream at once; the first error stops all, is noted and is raised."""
        try:
            return await self._all(work)
        except Exception as error:
            note_failure(self._id, error)
            raise

    async def _all(self, work: Callable[[int, GenerationStream], Awaitable[T]]) -> list[T]:
        if len(self._streams) == 1:
            return [await self._one(0, work)]
        tasks = [asyncio.create_task(self._one(i, work)) for i in self._streams]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, index: int, work: Callable[[int, GenerationStream], Awaitable[T]]) -> T:
        result = await work(index, self._streams[index])
        self._unfinished.discard(index)
        return result

    async def whole(self, request: Request, answer: Callable[[], Awaitable[Response]]) -> Response:
        """Wait for an answer that is sent at once; the slots are freed if the client does not wait for it."""
        response = Response(status_code=499)  # nobody is there to read it
        try:
            async with until_disconnect(request.receive):
                response = await answer()
        finally:
            self.close()
        return response
