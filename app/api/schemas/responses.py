"""The requests of /v1/responses and what belongs to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.schemas.base import Int, RequestModel
from app.api.schemas.sampling import SamplingFields

Id = Annotated[str, Field(max_length=256)]


class InputPart(RequestModel):
    """A part of a message, of a thought, or of what a tool returned."""

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[InputPart], Field(max_length=4096, fail_fast=True)]


class InputItem(RequestModel):
    """One step of a conversation: a message, a thought, a call, or what it returned. Without a type it is a message."""

    type: str | None = None
    id: Id | None = None
    role: str | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    call_id: Id | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | Parts | dict[str, Any] | None = None


class InnerTool(RequestModel):
    """A tool within a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None


class ResponsesTool(InnerTool):
    """A tool: a function, a custom one that takes plain text, or a namespace of such."""

    tools: Annotated[list[InnerTool], Field(max_length=1024, fail_fast=True)] | None = None


class TextFormat(RequestModel):
    """The form the answer must have."""

    type: str
    name: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class TextOptions(RequestModel):
    """How the text of the answer is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(RequestModel):
    """How the model thinks and how its thoughts are told: as they are, or, where a summary is asked for, as that."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class InputFields(RequestModel):
    """What makes the prompt of a response."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    input: Annotated[
        str | Annotated[list[InputItem], Field(max_length=16384, fail_fast=True)] | None,
        Field(description="Text of the user, or the steps of the conversation"),
    ] = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    prompt: Any = None


class ResponsesRequest(InputFields, SamplingFields):
    """A response to make."""

    stream: bool | None = None
    stop: str | list[str] | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: bool | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    max_tool_calls: Any = None


class InputTokensRequest(InputFields):
    """A response whose prompt is only counted."""
