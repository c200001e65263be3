"""The tools of a response as the functions that a model knows, and back.

A model calls functions with arguments in JSON. So a custom tool, which takes plain text, is a function with one string,
and the tools of a namespace are functions with the namespace in front of their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.schemas.chat import FunctionDefinition, Tool
from app.api.schemas.responses import InnerTool, ResponsesTool
from app.errors import InvalidParameter

#: Tools that the provider itself runs, and that clients list without minding that a provider has none of them.
IGNORED = ("web_search", "local_shell", "image_generation", "tool_search")
#: The one argument of a custom tool.
INPUT = "input"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST_CHARS = 128
_SYNTAX_CHARS = 64


@dataclass(frozen=True, slots=True)
class Face:
    """How a function of the model looks to the client."""

    name: str
    is_custom: bool = False
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Toolset:
    """`tools` as chat requests have them, and by their names how the client knows them."""

    tools: list[Tool] = field(default_factory=list)
    faces: dict[str, Face] = field(default_factory=dict)

    def face(self, name: str) -> Face:
        return self.faces.get(name, Face(name))


def flat_name(name: str, namespace: str | None) -> str:
    """The name under which a model knows a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def toolset(tools: Sequence[ResponsesTool]) -> Toolset:
    """Raises InvalidParameter for tools that are neither understood nor harmless to leave out."""
    found = Toolset()
    for i, tool in enumerate(tools):
        if tool.type.startswith(IGNORED):
            continue
        if tool.type != "namespace":
            _add(found, tool, None, f"tools[{i}]")
            continue
        namespace = _checked_name(tool, f"tools[{i}]")
        for k, inner in enumerate(tool.tools or ()):
            if not inner.type.startswith(IGNORED):
                _add(found, inner, namespace, f"tools[{i}].tools[{k}]")
    return found


def _add(found: Toolset, tool: InnerTool, namespace: str | None, where: str) -> None:
    if tool.type not in ("function", "custom"):
        raise InvalidParameter(
            f"{where} is of type {tool.type[:80]!r}, which this server does not run; functions and custom tools are "
            f"called, and {', '.join(IGNORED)} are left out",
            param=f"{where}.type",
            code="unsupported",
        )
    name = _checked_name(tool, where)
    flat = flat_name(name, namespace)
    if len(flat) > _MOST_CHARS:
        raise InvalidParameter(
            f"{where} has with its namespace a name of {len(flat)} characters, at most {_MOST_CHARS} are taken",
            param=f"{where}.name",
        )
    if flat in found.faces:
        raise InvalidParameter(f"two tools have the name {flat!r}", param=f"{where}.name")
    is_custom = tool.type == "custom"
    found.faces[flat] = Face(name, is_custom, namespace)
    function = FunctionDefinition.model_construct(
        name=flat,
        description=_custom_description(tool, where) if is_custom else tool.description,
        parameters=_CUSTOM_PARAMETERS if is_custom else tool.parameters,
    )
    found.tools.append(Tool.model_construct(type="function", function=function))


def _checked_name(tool: InnerTool, where: str) -> str:
    if tool.name is None or not _NAME.fullmatch(tool.name):
        raise InvalidParameter(
            f"{where} needs a name of up to {_MOST_CHARS} letters, digits, dots, dashes and underscores",
            param=f"{where}.name",
        )
    return tool.name


_CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def _custom_description(tool: InnerTool, where: str) -> str:
    """What a custom tool takes, in words."""
    described = tool.description or ""
    kind = (tool.format or {}).get("type", "text")
    if kind == "text":
        return described
    syntax, definition = (tool.format or {}).get("syntax"), (tool.format or {}).get("definition")
    if kind != "grammar" or not isinstance(syntax, str) or not isinstance(definition, str):
        raise InvalidParameter(
            f"{where}.format must be of type text, or of type grammar with a syntax and a definition",
            param=f"{where}.format",
        )
    return f"{described}\n\nThe {INPUT} must follow this {syntax[:_SYNTAX_CHARS]} grammar:\n{definition}".strip()


def chosen(choice: str | Mapping[str, Any] | None, found: Toolset) -> tuple[str | dict[str, Any] | None, list[Tool]]:
    """`tool_choice` as chat requests have it, and the tools it leaves."""
    if not isinstance(choice, Mapping):
        return choice, found.tools
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(choice, found)
    if kind not in ("function", "custom"):
        raise InvalidParameter(
            f"tool_choice is of type {str(kind)[:80]!r}; use none, auto, required, allowed_tools, or a function or "
            f"custom tool by its name",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": _flat_of(choice, found)}}, found.tools


def _allowed(choice: Mapping[str, Any], found: Toolset) -> tuple[str, list[Tool]]:
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise InvalidParameter(
            "tool_choice of type allowed_tools needs a mode, auto or required, and a list of tools", param="tool_choice"
        )
    named = [one for one in listed if isinstance(one, Mapping) and one.get("type") in ("function", "custom")]
    names = {_flat_of(one, found) for one in named}
    return mode, [tool for tool in found.tools if tool.function is not None and tool.function.name in names]


def _flat_of(choice: Mapping[str, Any], found: Toolset) -> str:
    """The function that a client names by its own name, with or without the namespace."""
    name, namespace = choice.get("name"), choice.get("namespace")
    flat = next(
        (
            flat
            for flat, face in found.faces.items()
            if name in (face.name, flat) and namespace in (None, face.namespace)
        ),
        None,
    )
    if flat is None:
        raise InvalidParameter(f"tool_choice names {str(name)[:80]!r}, which is none of the tools", param="tool_choice")
    return flat
