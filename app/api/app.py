"""Puts the HTTP surface together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from anyio import CapacityLimiter
from fastapi import FastAPI

from app.api import chat, errors, health, models
from app.api.body import AnyContentType
from app.api.context import Api
from app.api.options import ApiOptions
from app.engine.service import InferenceService

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(service: InferenceService, options: ApiOptions, *, lifespan: Lifespan | None = None) -> FastAPI:
    """The ASGI application over a service. Whoever made the service starts and stops it, in `lifespan` if they like."""
    app = FastAPI(title="Tandem", version=options.version, lifespan=lifespan, strict_content_type=False)
    app.state.api = Api(service, options, CapacityLimiter(options.text_threads))
    errors.install(app)
    for module in (chat, models, health):
        app.include_router(module.router)
    app.add_middleware(AnyContentType)
    return app
