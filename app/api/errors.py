"""The one map from errors to HTTP: class -> status, type, code, and the envelope every error body has."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from app import errors
from app.api.anthropic import errors as anthropic
from app.api.body import EarlyAnswer, TooLarge

log = logging.getLogger(__name__)


class Unauthorized(errors.RequestError):
    """No key, or a wrong one."""


class Cancelled(errors.RequestError):
    """Someone stopped the request by its id before it was done."""


class Disabled(errors.RequestError):
    """This server was started without that endpoint."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How one class of errors looks from outside. `code` is used when the error carries none."""

    status: int
    type: str
    code: str | None = None


#: Looked up along the error's MRO, so a subclass without a row looks like its parent.
KINDS: Mapping[type[Exception], Kind] = {
    Unauthorized: Kind(401, "authentication_error", "invalid_api_key"),
    Cancelled: Kind(499, "request_cancelled", "request_cancelled"),
    Disabled: Kind(501, "not_supported_error", "disabled"),
    errors.NotFound: Kind(404, "not_found_error", "not_found"),
    errors.BodyTooLarge: Kind(413, "invalid_request_error", "body_too_large"),
    errors.RequestError: Kind(400, "invalid_request_error"),
    errors.QueueFull: Kind(429, "rate_limit_error", "queue_full"),
    errors.NotReady: Kind(503, "unavailable_error", "not_ready"),
    errors.CapacityError: Kind(503, "unavailable_error", "no_capacity"),
    errors.DeadlineExceeded: Kind(504, "timeout_error", "request_timeout"),
    errors.DeviceLost: Kind(503, "unavailable_error", "device_lost"),
    errors.DeviceError: Kind(503, "server_error", "device_error"),
    errors.ProtocolError: Kind(502, "server_error", "worker_protocol_error"),
    errors.TandemError: Kind(500, "server_error", "internal_error"),
}
BUG = Kind(500, "server_error", "internal_error")
#: Errors the router itself raises, by status.
ROUTER_KINDS: Mapping[int, Kind] = {
    404: Kind(404, "not_found_error", "unknown_route"),
    405: Kind(405, "invalid_request_error", "method_not_allowed"),
    413: Kind(413, "invalid_request_error", "body_too_large"),
}
#: Seconds after which a client should come back when a device is lost: about one reconnect.
DEVICE_RETRY_S = 5.0


def kind_of(error: Exception) -> Kind:
    """The row of the nearest class in the error's MRO."""
    return next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), BUG)


def envelope(
    message: str, kind: Kind, *, param: str | None = None, code: str | None = None, **extra: object
) -> dict[str, Any]:
    """The error body, with OpenAI's four fields and ours after them."""
    return {"error": {"message": message, "type": kind.type, "param": param, "code": code or kind.code, **extra}}


def error_body(error: Exception) -> dict[str, Any]:
    """The body for any error. What is not ours is a bug, and its words stay in the log."""
    kind = kind_of(error)
    if not isinstance(error, errors.TandemError):
        return envelope("the server made a mistake; its log says more", kind)
    extra: dict[str, object] = {}
    if isinstance(error, errors.ContextLengthExceeded):
        extra = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
    elif isinstance(error, errors.DeviceLost):
        extra = {"endpoint": error.endpoint}
    elif loading := getattr(error, "loading", None):
        extra = {"loading": loading}
    return envelope(str(error), kind, param=getattr(error, "param", None), code=getattr(error, "code", None), **extra)


def error_headers(error: Exception) -> dict[str, str]:
    """Headers that belong to the error: when to come back, how to authenticate."""
    if isinstance(error, errors.CapacityError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, errors.DeviceLost):
        return {"Retry-After": str(math.ceil(DEVICE_RETRY_S))}
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def told_at(path: str, status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in the dialect of that path."""
    return anthropic.told(status, body) if path.startswith(anthropic.PATH) else (status, body)


def error_response(error: Exception, path: str) -> JSONResponse:
    """A whole answer for an error at that path; a bug is logged with its traceback here."""
    kind = kind_of(error)
    if kind.status == 500:
        log.error("request failed by a bug", exc_info=error)
    status, body = told_at(path, kind.status, error_body(error))
    return JSONResponse(body, status, error_headers(error))


def param_name(location: tuple[int | str, ...]) -> str | None:
    """`('body', 'messages', 0, 'str', 'role')` -> `messages[0].role`; names of union members are left out."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in UNION_TAGS:
            name += f".{part}" if name else part
    return name or None


#: Pydantic names the members of a union in its locations; they are not part of the request.
UNION_TAGS = frozenset({"str", "int", "float", "bool", "list", "dict", "body"})


def validation_error(error: RequestValidationError) -> errors.RequestError:
    """Pydantic's findings as one error that names the first wrong field.

    A union reports every member it tried; the ones that got deepest are what was meant.
    """
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return errors.InvalidParameter(f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if first["loc"] == ("body",):
        return errors.InvalidParameter("the body must be a JSON object", code="invalid_json")
    tried = [finding for finding in found if finding["loc"][:2] == first["loc"][:2]]
    depth = max(len(finding["loc"]) for finding in tried)
    deepest = [finding for finding in tried if len(finding["loc"]) == depth]
    reasons = dict.fromkeys(finding["msg"].removeprefix("Value error, ") for finding in deepest)
    reason = ", or ".join(reason[:1].lower() + reason[1:] for reason in reasons)
    param = param_name(tuple(deepest[0]["loc"]))
    return errors.InvalidParameter(f"{param}: {reason}", param=param, code="invalid_value")


def install(app: FastAPI) -> None:
    """Make every error of this app leave in the envelope."""

    async def on_tandem_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, request.url.path)

    async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error), request.url.path)

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        kind = ROUTER_KINDS.get(error.status_code, Kind(error.status_code, "invalid_request_error"))
        message = {
            404: f"no such route: {request.method} {request.url.path}; GET /openapi.json lists them all",
            405: f"{request.url.path} does not take {request.method}; send {(error.headers or {}).get('Allow')}",
        }.get(error.status_code, str(error.detail))
        answer = EarlyAnswer if isinstance(error, TooLarge) and error.has_rest else JSONResponse
        status, body = told_at(request.url.path, kind.status, envelope(message, kind))
        return answer(body, status, error.headers)

    app.add_exception_handler(errors.TandemError, on_tandem_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
