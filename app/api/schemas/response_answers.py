"""Shapes of what /v1/responses answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from app.api.schemas.base import AnswerModel


class OutputItem(AnswerModel):
    """A message, a thought, or a call of a tool."""

    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str


class InputTokensDetails(AnswerModel):
    """Of the prompt: how many tokens needed no work."""

    cached_tokens: int


class OutputTokensDetails(AnswerModel):
    """Of the answer: how many tokens were thinking."""

    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(AnswerModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(AnswerModel):
    """Why a response broke off."""

    reason: str


class ResponseObject(AnswerModel):
    """A response as it stands."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    previous_response_id: str | None
    usage: ResponseUsage | None


class ResponseEvent(AnswerModel):
    """One event of a streamed response; the events of one item carry its place and its id."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item_id: str | None = None


class InputItems(AnswerModel):
    """The steps that a response answered to."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(AnswerModel):
    """A response that is no more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(AnswerModel):
    """How many tokens a prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int
