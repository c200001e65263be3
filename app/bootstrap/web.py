"""The HTTP side of `tandem serve`: the web framework is loaded here and nowhere else."""

from __future__ import annotations

import socket

from app import __version__
from app.api.app import create_app
from app.api.half_close import HalfCloseProtocol
from app.api.options import ApiOptions
from app.engine.front import ServiceFront
from app.engine.request import SamplingParams
from app.http_server import HttpServer
from app.settings import ServeSettings


def http_server(settings: ServeSettings, service: ServiceFront, listener: socket.socket) -> HttpServer:
    """A server for this service on a socket that listens already."""
    return HttpServer(create_app(service, _api_options(settings)), listener, HalfCloseProtocol, service.close)


def _api_options(settings: ServeSettings) -> ApiOptions:
    return ApiOptions(
        version=__version__,
        api_keys=settings.api_keys(),
        cors_origins=settings.cors_origin,
        sampling=SamplingParams(
            temperature=settings.temp,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            typical_p=settings.typical,
            repeat_penalty=settings.repeat_penalty,
            repeat_last_n=settings.repeat_last_n,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            seed=None if settings.seed < 0 else settings.seed,
        ),
        cache_prompt=settings.cache_prompt,
        request_timeout_s=settings.timeout,
        any_model=settings.any_model,
        pooling=settings.pooling,
        reasoning_format=settings.reasoning_format,
        enable_slots=settings.slots,
        enable_props=settings.props,
        enable_metrics=settings.metrics,
    )
