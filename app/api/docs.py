"""The OpenAPI document: what each route answers, and nothing that it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.api.auth import PUBLIC_PATHS
from app.api.schemas.answers import ChatCompletionChunk, ErrorAnswer, InfillChunk, TextCompletionChunk
from app.api.schemas.anthropic_answers import MessageEvent
from app.api.schemas.response_answers import ResponseEvent

#: Why each status of an error comes.
ERRORS: Mapping[int, str] = {
    400: "Something in the request is wrong; `param` names it",
    401: "No key, or a wrong one",
    404: "No such model or object",
    413: "The body is too large",
    429: "The queue is full; come back after `Retry-After` seconds",
    499: "The request was cancelled by its id",
    500: "A bug of ours",
    501: "This server was started without this endpoint",
    502: "A worker broke the protocol",
    503: "Loading, draining, or a worker is lost; come back after `Retry-After` seconds",
    529: "The queue is full; come back after `Retry-After` seconds",
}
#: Errors of routes that only look, of those that also read a body, and of those that run the model.
LOOKING = (401, 500, 503)
READING = (*LOOKING, 400, 413)
GENERATING = (*READING, 404, 429, 499, 502)

#: What streams carry. The framework does not know of them, so they are put into the document here.
EVENTS = (ChatCompletionChunk, TextCompletionChunk, InfillChunk, MessageEvent, ResponseEvent)
REFERENCE = "#/components/schemas/{model}"
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def answers(
    ok: Any,
    errors: tuple[int, ...] = (),
    *,
    event: type[BaseModel] | None = None,
    also: Mapping[int, type[BaseModel]] | None = None,
    error: type[BaseModel] = ErrorAnswer,
    end_mark: bool = True,
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator: what it answers when all is well, and otherwise.

    `event` is the JSON in each event of a stream, one of EVENTS; with `end_mark`, `[DONE]` comes last. `error` is the
    shape of errors.
    """
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": error, "description": ERRORS[status]} for status in sorted(errors)
    }
    for status, model in (also or {}).items():
        responses[status] = {"model": model, "description": ERRORS[status]}
    if event is not None:
        responses[200] = {
            "description": "The answer, whole or, with `stream` true, in events",
            "content": {"text/event-stream": {"itemSchema": event_schema(event, end_mark)}},
        }
    return {"response_model": ok, "responses": responses}


def event_schema(model: type[BaseModel], end_mark: bool) -> dict[str, Any]:
    """An event as OpenAPI 3.2 describes it: `data` is JSON, or the end mark."""
    payload = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": REFERENCE.format(model=model.__name__)},
    }
    data = {"anyOf": [{"const": "[DONE]"}, payload]} if end_mark else payload
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": data, "event": {"type": "string"}},
    }


def install(app: FastAPI, *, has_keys: bool) -> None:
    """Make `/openapi.json` tell the truth."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build(app, has_keys=has_keys)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def build(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """The framework's document, without the error shape that is not ours, and with the keys."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, openapi_version="3.2.0"
    )
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if not has_keys or path in PUBLIC_PATHS:
                operation["responses"].pop("401", None)
            if has_keys and path in PUBLIC_PATHS:
                operation["security"] = []
    schemas = document["components"]["schemas"]
    _, events = models_json_schema([(model, "serialization") for model in EVENTS], ref_template=REFERENCE)
    schemas.update(events["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    if has_keys:
        document["components"]["securitySchemes"] = KEY_SCHEMES
        document["security"] = [{name: []} for name in KEY_SCHEMES]
    return document
