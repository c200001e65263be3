"""API keys: a Bearer token or x-api-key, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import Unauthorized, error_response

#: What answers without a key: probes must work for those who hold none.
PUBLIC_PATHS = frozenset({"/", "/health", "/v1/health", "/healthz", "/readyz"})


class Keys:
    """The keys that open the door. None: it stands open."""

    def __init__(self, keys: Iterable[str]) -> None:
        # A header's bytes are UTF-8 from some clients and Latin-1 from others.
        self._keys = tuple({encoded for key in keys for encoded in encodings(key)})

    def __bool__(self) -> bool:
        return bool(self._keys)

    def accept(self, offered: Iterable[bytes]) -> bool:
        """Whether any of the offered keys is one of ours. Takes as long for a near miss as for a far one."""
        found = False
        for offer in offered:
            for key in self._keys:
                found |= hmac.compare_digest(offer, key)
        return found


def encodings(key: str) -> set[bytes]:
    """The key as clients may encode it."""
    try:
        return {key.encode(), key.encode("latin-1")}
    except UnicodeEncodeError:
        return {key.encode()}


def offered_keys(scope: Scope) -> list[bytes]:
    """Keys in the request's headers. Two Authorization headers are none: they could be read in two ways."""
    tokens = [value for name, value in scope["headers"] if name == b"authorization"]
    keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
    scheme, _, token = tokens[0].partition(b" ") if len(tokens) == 1 else (b"", b"", b"")
    return [*keys, token.strip()] if scheme.lower() == b"bearer" else keys


class Authentication:
    """Turns away who offers no key of ours, except from the public paths."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or scope["method"] == "OPTIONS"
        if free or self._keys.accept(offered_keys(scope)):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("a valid API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        await error_response(error, scope["path"])(scope, receive, send)
