"""A fake engine, an app over it, and a client that needs no socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from app.api.app import create_app
from app.api.options import ApiOptions
from tests.fakes.engine import FakeEngine

ClientFor = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def client_for(engine: FakeEngine, options: ApiOptions | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose requests reach the app as calls."""
    transport = httpx.ASGITransport(create_app(engine, options or ApiOptions(version="1.2")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine) as client:
        yield client
