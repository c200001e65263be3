"""Puts the HTTP surface together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app.api import (
    cancel,
    chat,
    completions,
    docs,
    embeddings,
    errors,
    health,
    infill,
    metrics,
    models,
    rerank,
    state,
    text,
)
from app.api.anthropic import routes as messages
from app.api.auth import Authentication, Keys
from app.api.body import AnyContentType
from app.api.context import Api
from app.api.direct import DirectSend
from app.api.edge import Edge
from app.api.head import HeadAsGet
from app.api.options import ApiOptions
from app.api.responses import routes as responses
from app.engine.service import InferenceService

ROUTES = (
    *(chat, responses, messages, completions, infill),
    *(embeddings, rerank, text, cancel, models, state, metrics, health),
)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(service: InferenceService, options: ApiOptions, *, lifespan: Lifespan | None = None) -> FastAPI:
    """The ASGI application over a service. Whoever made the service starts and stops it, in `lifespan` if they like."""
    app = FastAPI(title="Tandem", version=options.version, lifespan=lifespan, strict_content_type=False)
    app.state.api = Api(service, options, CapacityLimiter(options.text_threads))
    errors.install(app)
    for module in ROUTES:
        app.include_router(module.router)
    docs.install(app, has_keys=bool(options.api_keys))
    add_layers(app, options)
    return app


def add_layers(app: FastAPI, options: ApiOptions) -> None:
    """Middleware, the innermost first. CORS stands outside of the keys: a preflight carries none."""
    app.add_middleware(AnyContentType)
    app.add_middleware(HeadAsGet)
    if keys := Keys(options.api_keys):
        app.add_middleware(Authentication, keys=keys)
    app.add_middleware(Edge)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
        )
    app.add_middleware(DirectSend)
