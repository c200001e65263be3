"""Shapes of what /v1/messages answers, for the OpenAPI document; answers themselves are made by hand."""

from __future__ import annotations

from typing import Any, Literal

from app.api.schemas.base import AnswerModel


class AnthropicErrorDetails(AnswerModel):
    """Which cause it was, and which field of the request, where there is one."""

    error_code: str | None = None
    param: str | None = None


class AnthropicErrorObject(AnswerModel):
    """What went wrong, and what to do about it."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "api_error",
        "overloaded_error",
    ]
    message: str
    details: AnthropicErrorDetails


class AnthropicError(AnswerModel):
    """The body of every error below /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


class ContentBlock(AnswerModel):
    """A thought, text, or a call of a tool."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: str | None = None
    signature: str | None = None
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class OutputTokensDetails(AnswerModel):
    """Of the answer: how many tokens were thinking."""

    thinking_tokens: int


class MessageUsage(AnswerModel):
    """Counts of tokens. The prompt is the sum of the first three: what had to be computed, and what was cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageAnswer(AnswerModel):
    """A whole answer. `stop_reason` is null only where a stream begins."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(AnswerModel):
    """One event of a streamed answer; its type is also the name of the event."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: AnthropicErrorObject | None = None
    request_id: str | None = None


class TokenCount(AnswerModel):
    """The length of a prompt."""

    input_tokens: int
