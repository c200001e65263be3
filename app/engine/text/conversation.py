"""Prepares messages for a template: the shapes it can take, without losing anything that was said.

What comes in is what clients send; what goes out are plain dicts and lists, copied, so a template can change nothing
outside itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidParameter

Message = dict[str, Any]

_DEEPEST = 64
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

#: Between texts of one message that came in parts, and between an instruction and the turn that takes it in.
_LINE = "\n"
#: Between instructions that were messages of their own.
_PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a template can take, found by rendering small conversations with it.

    `list_roles`: roles whose content may be a list of parts; `list_only`: strings are not taken at all.
    `object_arguments`: arguments of calls are objects, not JSON text; `null_with_calls`: calls show only beside no
    content at all. `calls`: calls and what they returned show; `tools`: the tools that are offered do. `reasoning_key`:
    where it looks for an assistant's thoughts, None when it shows none.
    `thinking_switch`: `enable_thinking` makes a difference.
    """

    system: bool = True
    later_systems: bool = True
    developer: bool = False
    list_roles: frozenset[str] = frozenset()
    list_only: bool = False
    tools: bool = False
    calls: bool = False
    object_arguments: bool = True
    null_with_calls: bool = False
    reasoning_key: str | None = None
    thinking_switch: bool = False


def plain_copy(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a JSON value that shares no container with it. Raises InvalidParameter for anything else."""
    if value is None or isinstance(value, str | int | float):
        return value
    if depth > _DEEPEST:
        raise InvalidParameter(f"{where} is nested more than {_DEEPEST} levels deep", param=where)
    if isinstance(value, Mapping):
        return {str(key): plain_copy(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item, where, depth + 1) for item in value]
    raise InvalidParameter(f"{where} holds a {type(value).__name__}, which is no JSON value", param=where)


def size_chars(value: Any) -> int:
    """Characters of a plain value, structure included, roughly."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + size_chars(item) for key, item in value.items())
    if isinstance(value, list):
        return len(value) + sum(map(size_chars, value))
    return 8


def prepare(messages: Sequence[Mapping[str, Any]], able: Capabilities) -> list[Message]:
    """Messages as the template takes them, in the order they were given. Raises InvalidParameter, naming the field."""
    return [_prepared(message, f"messages[{i}]", able) for i, message in enumerate(messages)]


def _prepared(message: Mapping[str, Any], where: str, able: Capabilities) -> Message:
    ready: Message = plain_copy(message, where)
    role = ready.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameter(f"{where} needs a role", param=f"{where}.role")
    if role == "developer" and not able.developer:
        role = ready["role"] = "system"
    ready["content"] = _content(ready.get("content"), role, f"{where}.content", able)
    _prepare_calls(ready, where, able)
    _prepare_reasoning(ready, able)
    return ready


def _content(content: Any, role: str, where: str, able: Capabilities) -> Any:
    if content is None:
        if role in ("user", "system", "developer"):
            raise InvalidParameter(f"{where} must be text or a list of parts", param=where)
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if able.list_only else content
    if not isinstance(content, list):
        raise InvalidParameter(f"{where} must be text or a list of parts", param=where)
    if role in able.list_roles:
        return content
    return text_of(content, where)


def text_of(content: str | list[Any], where: str = "content") -> str:
    """The text of a content field; parts go on lines of their own."""
    if isinstance(content, str):
        return content
    return _LINE.join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidParameter(f"{where} is of type {kind!r}; this model takes text parts only", param=where)
    return text


def _prepare_calls(message: Message, where: str, able: Capabilities) -> None:
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidParameter(f"{where}.tool_calls must be a list of calls", param=f"{where}.tool_calls")
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict):
            convert = _as_object if able.object_arguments else _as_text
            function["arguments"] = convert(function.get("arguments"))
    if able.null_with_calls and not message["content"]:
        message["content"] = None


def _as_object(arguments: Any) -> Any:
    """What is no JSON object stays as it is: a model may have written it, and the client cannot mend it."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _prepare_reasoning(message: Message, able: Capabilities) -> None:
    given: list[Any] = [message.pop(key, None) for key in ("reasoning_content", "reasoning", "thinking")]
    thought: str = next((text for text in given if isinstance(text, str) and text), "")
    if not thought:
        return
    message["reasoning_content"] = thought
    if able.reasoning_key == "thinking" and message.get("tool_calls") and message["content"]:
        # Templates of this family take either the thought or a preamble with a call, not both.
        thought, message["content"] = f"{thought}{_PARAGRAPH}{text_of(message['content'])}", ""
    if able.reasoning_key is not None:
        message[able.reasoning_key] = thought


def is_instruction(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def fold_first_system(messages: list[Message]) -> list[Message] | None:
    """For templates without a system role: the first instruction goes to the head of the turn behind it.

    None when there is no such turn.
    """
    if not messages or not is_instruction(messages[0]):
        return messages
    if len(messages) == 1:
        return None
    return [_with_head(messages[1], text_of(messages[0]["content"])), *messages[2:]]


def place_instructions(messages: Sequence[Message], able: Capabilities) -> list[Message]:
    """For templates with one place for instructions or none: those in front become one; a later one goes to the head
    of the user's turn behind it, or is such a turn, so that what stands before it stays as it was."""
    placed: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if is_instruction(message):
            waiting.append(text_of(message["content"]))
            continue
        head, waiting = _PARAGRAPH.join(filter(None, waiting)), []
        if head and able.system and not placed:
            placed.append(_turn("system", head, able))
        elif head and message["role"] == "user":
            message = _with_head(message, head)
        elif head:
            placed.append(_turn("user", head, able))
        placed.append(message)
    if rest := _PARAGRAPH.join(filter(None, waiting)):
        placed.append(_turn("system" if able.system and not placed else "user", rest, able))
    return placed


def _turn(role: str, text: str, able: Capabilities) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}] if able.list_only else text}


def _with_head(message: Message, head: str) -> Message:
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": head + _LINE}, *content]}
    return {**message, "content": f"{head}{_LINE}{content}" if content else head}


def count_instructions(messages: Iterable[Message]) -> int:
    return sum(map(is_instruction, messages))
