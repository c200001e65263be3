"""The request and the answers of /v1/rerank, in the two shapes that clients know."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from app.api.schemas.base import AnswerModel, Int, RequestModel


class Document(RequestModel):
    """A document in an object."""

    text: str


Documents = Annotated[list[str | Document], Field(min_length=1, max_length=2048, fail_fast=True)]


class RerankRequest(RequestModel):
    """A query, and documents to put in the order in which they answer it."""

    query: str
    documents: Documents | None = None
    texts: Annotated[Documents | None, Field(description="Instead of documents: the answer is a plain list")] = None
    model: Annotated[str, Field(max_length=1024)] | None = None
    top_n: Annotated[Int, Field(ge=1, description="Tell of the best so many")] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None


class RankedDocument(AnswerModel):
    """A document by its place in the request. `document` with `return_documents`."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankUsage(AnswerModel):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class Rerank(AnswerModel):
    """The documents, best first."""

    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: RerankUsage


class RankedText(AnswerModel):
    """A text by its place in the request. `text` with `return_text`."""

    index: int
    score: float
    text: str | None = None
