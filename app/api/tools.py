"""The tools a request offers: how the model is told of them, how its calls are found, and when it must call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.context import Api
from app.api.messages import Turn
from app.api.schemas.chat import ChatRequest, Tool
from app.api.told_calls import has_calls, told_in_words
from app.engine.request import Constraint
from app.engine.service import InferenceService
from app.engine.text.call_grammar import call_grammar, or_answer
from app.engine.text.calls.base import CallFormat
from app.engine.text.grammar_parts import param_of
from app.engine.text.tool_calls import GENERIC, CallParser, call_format_of
from app.errors import InvalidParameter

MOST_TOOLS = 128
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

INSTRUCTION = (
    "You can call these functions, each described by a JSON object with a schema of its parameters:\n{tools}\n\n"
    "To call functions, answer with nothing but a JSON object of this form:\n"
    '{{"tool_calls": [{{"name": "<function>", "arguments": {{<its parameters>}}}}]}}\n'
    'What they return comes back as a JSON object with "tool_results". Otherwise answer in plain words.'
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What is needed to find calls in answers. `most`: more calls than that are left out; 0: no tool may be called, and
    a model that calls all the same is not heard. `constraint`: how the answer is made to be calls, where it must be."""

    family: CallFormat
    tools: Mapping[str, Mapping[str, Any]]
    most: int | None
    constraint: Constraint | None

    def parser(self) -> CallParser:
        return CallParser(self.family, self.tools, most=self.most)


def offered(body: ChatRequest) -> list[Tool]:
    """The tools the model may call. Raises InvalidParameter for what is wrong with them or with `tool_choice`."""
    tools = body.tools or []
    if len(tools) > MOST_TOOLS:
        raise InvalidParameter(f"tools has {len(tools)} tools, at most {MOST_TOOLS} are taken", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.type not in (None, "function") or tool.function is None:
            raise InvalidParameter(
                f"tools[{i}] is of type {str(tool.type)[:80]!r}; only functions can be called", param=f"tools[{i}].type"
            )
        if tool.function.name in names:
            raise InvalidParameter(f"two tools have the name {tool.function.name!r}", param=f"tools[{i}].function.name")
        names.add(tool.function.name)
    choice = body.tool_choice
    if choice is None or choice == "auto" or choice == "none":
        return [] if choice == "none" else tools
    if choice != "required" and not isinstance(choice, dict):
        raise InvalidParameter(
            f"tool_choice {choice[:80]!r} is not known; use none, auto, required or a function's name in an object",
            param="tool_choice",
        )
    if not tools:
        raise InvalidParameter("tool_choice needs tools to choose from", param="tool_choice")
    if isinstance(choice, dict) and chosen_name(choice) not in names:
        raise InvalidParameter(
            f"tool_choice names {chosen_name(choice)[:80]!r}, which is none of the tools", param="tool_choice"
        )
    return tools


def chosen_name(choice: Mapping[str, Any]) -> str:
    """The function that a `tool_choice` object names."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidParameter(
            'tool_choice must be of the form {"type": "function", "function": {"name": ...}}', param="tool_choice"
        )
    return name


def definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates read them; those that print a description or parameters find them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or dict(NO_PARAMETERS),
            },
        }
        for tool in tools
        if tool.function is not None
    ]


def with_tools(turns: list[Turn], tools: list[dict[str, Any]], service: InferenceService) -> tuple[list[Turn], Any]:
    """The conversation and what to give the template as tools: nothing if it cannot show them, then they and all that
    was called are told in words."""
    if not tools and not has_calls(turns):
        return turns, None
    template = service.template.for_tools if tools else service.template
    if template.capabilities.tools:
        return turns, tools or None
    if not tools:
        return turns if template.capabilities.calls else told_in_words(turns), None
    turns = told_in_words(turns)
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return [{"role": "system", "content": INSTRUCTION.format(tools=listed)}, *turns], None


def tool_use(body: ChatRequest, api: Api, form: Constraint | None) -> ToolUse | None:
    """None when there are no tools. `form` is what an answer that calls nothing must be. Raises InvalidParameter."""
    tools = offered(body) or body.tools
    if not tools:
        return None
    schemas = {
        tool.function.name: tool.function.parameters or NO_PARAMETERS for tool in tools if tool.function is not None
    }
    template = api.service.template.for_tools
    family = call_format_of(template.source) if template.capabilities.tools else GENERIC
    api.service.tokenizer.show_always(family.markers)
    if body.tool_choice == "none":
        # A form leaves no room for calls, and what only looks like one is meant.
        return None if form is not None or family is GENERIC else ToolUse(family, schemas, 0, None)
    most = 1 if body.parallel_tool_calls is False else None
    if body.tool_choice in (None, "auto"):
        constraint = None if form is None else _may_call(form, family, template.source, schemas, api, most)
        return ToolUse(family, schemas, most, constraint)
    if form is not None:
        _check_beside_calls(form, api)
    if isinstance(body.tool_choice, dict):
        name = chosen_name(body.tool_choice)
        schemas, most = {name: schemas[name]}, 1
    constraint = _must_call(family, template.source, schemas, api, several=most is None)
    return ToolUse(family, schemas, most, constraint)


def check_each(tools: Mapping[str, Mapping[str, Any]], api: Api) -> None:
    """Raises InvalidParameter that names the first of the tools whose parameters, by themselves, cannot be held to."""
    for name, schema in tools.items():
        source = json.dumps({"type": "object", **schema}, ensure_ascii=False)
        api.service.grammars.check(Constraint(kind="json_schema", source=source, param=param_of(name)))


def _check_beside_calls(form: Constraint, api: Api) -> None:
    """An answer that must call has no text that could have a form; what is wrong with the form is refused all the same.

    Agents ask for both, and for the form alone once their tools were called.
    """
    _check_goes_with_tools(form)
    api.service.grammars.check(form)


def _check_goes_with_tools(form: Constraint) -> None:
    if form.kind != "json_schema":
        raise InvalidParameter(
            f"{form.param} does not go with tools here; leave one out or set tool_choice to none", param=form.param
        )


def _may_call(
    form: Constraint,
    family: CallFormat,
    source: str,
    schemas: Mapping[str, Mapping[str, Any]],
    api: Api,
    most: int | None,
) -> Constraint:
    """Calls, or an answer of the form."""
    _check_goes_with_tools(form)
    if api.answers_in_messages:
        raise InvalidParameter(
            f"{form.param} does not go with tools in this model's message format; leave one out or set tool_choice to "
            f"none or required",
            param=form.param,
            code="unsupported",
        )
    calls = _must_call(family, source, schemas, api, several=most is None)
    return Constraint(kind="lark", source=or_answer(calls.source, form.source, form.param), param=form.param)


def _must_call(
    family: CallFormat, source: str, schemas: Mapping[str, Mapping[str, Any]], api: Api, *, several: bool
) -> Constraint:
    typed = {name: {"type": "object", **schema} for name, schema in schemas.items()}
    grammar = call_grammar(family, source, typed, api.marks, several=several)
    return Constraint(kind="lark", source=grammar, param="tools")
