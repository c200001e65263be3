"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.schemas.base import Int, RequestModel
from app.api.schemas.sampling import GenerationFields, StreamOptions

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(RequestModel):
    """One part of a message. Only text is understood; parts of other kinds are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(RequestModel):
    """A call an assistant made earlier. `arguments` is JSON in a string, as OpenAI writes it, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(RequestModel):
    """One entry of an earlier assistant message's `tool_calls`."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(RequestModel):
    """One message of the conversation."""

    role: Role
    content: str | Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class JsonSchemaFormat(RequestModel):
    """A JSON schema that the answer must match. `strict` or not, it always does."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class ResponseFormat(RequestModel):
    """The form the answer must have."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", description="llama-server's place of it")] = None


class FunctionDefinition(RequestModel):
    """A function the model may call. `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool the model may call; only functions are."""

    type: str | None = None
    function: FunctionDefinition | None = None


class ChatRequest(GenerationFields):
    """A conversation to continue by one assistant message."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=0, description="Wins over max_tokens")] | None = None
    n_predict: Annotated[Int, Field(ge=-1, description="llama-server's name of max_tokens; -1: no limit")] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    response_format: ResponseFormat | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
