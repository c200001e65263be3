"""Errors as Anthropic's clients know them: made from the status and the envelope that all other routes answer with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app import logs

#: Paths whose errors are told in this dialect begin like this.
PATH = "/v1/messages"
#: Where an answer carries the id of its request there.
ID_HEADER = "request-id"
#: Status -> status and type. A server that has no room is overloaded, in these clients' words; 429 is about a budget.
TYPES: Mapping[int, tuple[int, str]] = {
    401: (401, "authentication_error"),
    404: (404, "not_found_error"),
    413: (413, "request_too_large"),
    429: (529, "overloaded_error"),
    503: (503, "overloaded_error"),
}


def told(status: int, envelope: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the body in this dialect. What it has no place for stands in the details."""
    error = dict(envelope["error"])
    own_status, kind = TYPES.get(status, (status, "api_error" if status >= 499 else "invalid_request_error"))
    message, code = error.pop("message"), error.pop("code")
    del error["type"]
    if code == "context_length_exceeded":
        # Agents look for these words, to shorten the conversation and go on.
        message = f"prompt is too long: {error['n_prompt_tokens']} tokens > {error['n_ctx'] - 1} maximum; {message}"
    details = {name: value for name, value in {"error_code": code, **error}.items() if value is not None}
    body = {"type": kind, "message": message, "details": details}
    return own_status, {"type": "error", "error": body, "request_id": logs.request_id.get() or None}
