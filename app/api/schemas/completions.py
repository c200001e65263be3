"""The requests of /v1/completions and /infill."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from app.api.schemas.base import Int, RequestModel, TokenId
from app.api.schemas.sampling import GenerationFields, StreamOptions

#: More than any model's context holds.
MOST_IDS, MOST_TEXTS = 1 << 20, 4096
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_IDS, fail_fast=True)]
Texts = Annotated[list[str | TokenIds], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
MaxTokens = Annotated[Int, Field(ge=0)]
NPredict = Annotated[Int, Field(ge=-1, description="llama-server's name of max_tokens; -1: no limit")]


class CompletionRequest(GenerationFields):
    """Text to go on from: one prompt or several, as strings or as token ids."""

    prompt: Annotated[
        str | TokenIds | Texts,
        Field(description="A string, a list of token ids, or a list of either"),
    ]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    n_predict: NPredict | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[Int, Field(ge=0, description="Alternatives per token")] | None = None
    n_probs: Annotated[Int, Field(ge=0, description="llama-server's name of logprobs; 0: none")] | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None


class ExtraFile(RequestModel):
    """A file that the text to fill in may depend on."""

    filename: str | None = None
    text: str


class InfillRequest(GenerationFields):
    """A hole in a file: what stands before it, what after it, and other files of the project."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: Annotated[str, Field(description="Text at the hole that was typed already")] | None = None
    n_predict: NPredict | None = None
    max_tokens: MaxTokens | None = None
    n_probs: Annotated[Int, Field(ge=0)] | None = None
