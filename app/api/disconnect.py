"""Notices a client that goes away while nobody is reading from it or writing to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import CancelScope
from starlette.types import Receive


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block, and go on after it, when the client goes away."""
    scope = CancelScope()

    async def watch() -> None:
        await wait_for_disconnect(receive)
        scope.cancel()

    task = asyncio.create_task(watch())
    try:
        with scope:
            yield
    finally:
        task.cancel()
