"""The requests of /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.schemas.base import Int, RequestModel
from app.api.schemas.sampling import SamplingFields


class Block(RequestModel):
    """One block of a message's content. Which fields it needs depends on its type; types that only Anthropic's own
    servers understand are refused by name."""

    type: Annotated[
        str,
        Field(description="text, thinking, redacted_thinking, tool_use, tool_result, document or search_result"),
    ]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | Blocks | None = None
    is_error: bool | None = None
    source: dict[str, Any] | str | None = None
    title: str | None = None
    context: str | None = None


Blocks = Annotated[list[Block], Field(max_length=4096, fail_fast=True)]


class MessageParam(RequestModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Thinking(RequestModel):
    """Whether the model thinks before it answers; without this it does not, where it can be told so."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: (
        Annotated[Int, Field(ge=1, description="A hint; what bounds thought and answer is max_tokens")] | None
    ) = None
    display: Annotated[Literal["summarized", "omitted"] | None, Field(description="omitted: not shown, but kept")] = (
        None
    )


class ToolParam(RequestModel):
    """A tool. Those with an `input_schema` can be called; those that Anthropic's servers run are passed over."""

    type: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(RequestModel):
    """Whether a tool may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(description="With type tool: which one")] = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(RequestModel):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    """How much work goes into the answer, and its form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(RequestModel):
    """A conversation whose prompt is to be counted."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[ToolParam], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, Field(description="An older place of output_config.format")] = None
    mcp_servers: Any = None
    container: Any = None


class MessagesRequest(CountTokensRequest, SamplingFields):
    """A conversation to continue by one assistant message. Sampling may be steered as in /v1/chat/completions."""

    max_tokens: Annotated[Int, Field(ge=0, description="0: compute the prompt and answer nothing")]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
