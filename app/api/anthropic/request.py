"""From Anthropic's request to the chat request it is answered as."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.api.anthropic.blocks import chat_messages, instructions
from app.api.schemas.anthropic import CountTokensRequest, MessagesRequest, ToolChoice, ToolParam
from app.api.schemas.chat import ChatRequest, FunctionDefinition, JsonSchemaFormat, Message, ResponseFormat, Tool
from app.api.schemas.sampling import SamplingFields
from app.errors import InvalidParameter, RequestError

log = logging.getLogger(__name__)

#: How `reasoning_effort` calls the efforts that it has other names for.
EFFORTS = {"xhigh": "high", "max": "high"}
#: The beginnings of types whose tools Anthropic's own servers run. Like any tool, they are an offer to the model.
SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
MOST_TURNS = 4096

CHOICES: Mapping[str, Callable[[ToolChoice], Any]] = {
    "auto": lambda choice: "auto",
    "none": lambda choice: "none",
    "any": lambda choice: "required",
    "tool": lambda choice: {"type": "function", "function": {"name": choice.name}},
}
#: Fields of a chat request that are called otherwise here, where an error may name them.
RENAMED = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The same conversation as a chat request, and how it is to be answered. Raises InvalidParameter."""
    refuse_remote(body)
    tools = client_tools(body.tools or ())
    choice = chosen(body.tool_choice, body.tools or (), tools)
    form = (body.output_config and body.output_config.format) or body.output_format
    effort = body.output_config and body.output_config.effort
    # What is made here needs no second look, and a second look could find nothing that a client would understand.
    return ChatRequest.model_construct(
        **answered_how(body),
        model=body.model,
        messages=turns(body),
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        reasoning_effort=EFFORTS.get(effort, effort) if effort else None,
        response_format=None if form is None else json_format(form.schema_),
        chat_template_kwargs={"enable_thinking": body.thinking is not None and body.thinking.type != "disabled"},
    )


def json_format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat.model_validate({"schema": schema}))


def answered_how(body: CountTokensRequest) -> dict[str, Any]:
    """The fields that say how much of an answer is wanted and how its tokens are chosen."""
    if not isinstance(body, MessagesRequest):
        return {}
    sampling = {name: getattr(body, name) for name in SamplingFields.model_fields}
    return {**sampling, "max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}


def turns(body: CountTokensRequest) -> list[Message]:
    """Instructions and conversation."""
    system = instructions(body.system, "system") if body.system else ""
    messages = [Message(role="system", content=system)] if system else []
    messages += chat_messages(body.messages)
    if len(messages) > MOST_TURNS:
        raise InvalidParameter(f"messages has {len(messages)} turns, at most {MOST_TURNS} are taken", param="messages")
    if not messages:
        raise InvalidParameter("messages has nothing in it to answer", param="messages")
    return messages


def client_tools(given: Sequence[ToolParam]) -> list[Tool]:
    """The tools that the client runs. Those of Anthropic's servers are no use here and are left out, but not if nothing
    else is offered: then they are what the request is about. Raises InvalidParameter."""
    tools: list[Tool] = []
    for i, tool in enumerate(given):
        kind = tool.type or "custom"
        if kind.startswith(SERVER_TOOLS):
            log.debug("a tool was left out", extra={"type": kind})
            continue
        if kind != "custom":
            raise InvalidParameter(
                f"tools[{i}] is of type {kind[:80]!r}, whose schema is not known here; describe it by an input_schema "
                f"and leave its type out",
                param=f"tools[{i}].type",
                code="unsupported",
            )
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise InvalidParameter(f"tools[{i}] needs its {name}", param=f"tools[{i}].{name}")
        function = FunctionDefinition(
            name=tool.name or "", description=tool.description, parameters=tool.input_schema or None
        )
        tools.append(Tool(type="function", function=function))
    if given and not tools:
        raise InvalidParameter(
            f"tools[0] is of type {str(given[0].type)[:80]!r}, which only Anthropic's servers can run; offer a tool of "
            f"your own that does the same",
            param="tools",
            code="unsupported",
        )
    return tools


def chosen(choice: ToolChoice | None, given: Sequence[ToolParam], tools: Sequence[Tool]) -> Any:
    """`tool_choice` in a chat request's words. Raises InvalidParameter for a name that is none of the tools'."""
    if choice is None:
        return None
    names = {tool.function.name for tool in tools if tool.function is not None}
    if choice.type == "tool" and choice.name not in names:
        left_out = choice.name in {tool.name for tool in given}
        why = "only Anthropic's servers can run" if left_out else "is none of the tools"
        raise InvalidParameter(f"tool_choice names {str(choice.name)[:80]!r}, which {why}", param="tool_choice.name")
    return CHOICES[choice.type](choice)


def refuse_remote(body: CountTokensRequest) -> None:
    """Raise for what needs Anthropic's servers."""
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise InvalidParameter(
                f"{name} is not supported: nothing runs here but the model; leave it out and offer tools instead",
                param=name,
                code="unsupported",
            )


def in_own_words(error: RequestError) -> RequestError:
    """The same error about a chat request, naming the field by the name that it has in Anthropic's."""
    param = error.param or ""
    if param in RENAMED:
        error.param = RENAMED[param]
    elif param.startswith("tools["):
        error.param = param.replace(".function.parameters", ".input_schema").replace(".function", "")
    elif param.startswith("messages["):
        error.param = "messages"  # the turns of a chat request are numbered otherwise
    return error
