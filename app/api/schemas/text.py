"""The requests about text as such: tokens, templates, vectors, and stopping."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from app.api.schemas.base import Int, RequestModel, TokenId
from app.api.schemas.completions import MOST_IDS, Texts, TokenIds


class TokenizeRequest(RequestModel):
    """Text to cut into tokens. Pieces of a list may be token ids already."""

    content: str | Annotated[list[str | TokenId], Field(max_length=MOST_IDS, fail_fast=True)]
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(RequestModel):
    """Tokens to put together."""

    tokens: Annotated[list[TokenId], Field(max_length=MOST_IDS, fail_fast=True)]


class EmbeddingRequest(RequestModel):
    """Texts to place in the model's vector space."""

    input: Annotated[
        str | TokenIds | Texts,
        Field(description="A string, a list of token ids, or a list of either"),
    ]
    model: Annotated[str, Field(max_length=1024)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Int, Field(ge=1, description="Keep this many, scaled to length 1 again")] | None = None
    pooling: Literal["mean", "last"] | None = None
    embd_normalize: Annotated[Int, Field(description="2: length 1, the default; -1: as it is")] | None = None


class CancelRequest(RequestModel):
    """A request to stop, by the id its answer carries."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
