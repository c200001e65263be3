"""Finds out what a template can take, by rendering small conversations and looking for their words in the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from app.engine.text.conversation import Capabilities, Message

#: Words that no template writes by itself.
_USER, _SECOND, _SYSTEM, _LATER, _ANSWER, _THOUGHT = (
    "zquser",
    "zqsecond",
    "zqsystem",
    "zqlater",
    "zqanswer",
    "zqthought",
)
_KEY, _VALUE, _NAME = "zqkey", "zqvalue", "zqname"

#: Exactly nine letters and digits: some templates insist.
_CALL_ID = "zq1234567"


class Try(Protocol):
    """Renders messages; None when the template refuses or fails."""

    def __call__(self, messages: list[Message], **variables: Any) -> str | None: ...


def find_capabilities(source: str, attempt: Try) -> Capabilities:
    """What the template can take. Each answer stands on its own: a template may fail at any of them."""
    list_only = not _shows(attempt([_user(_USER)]), _USER) and _shows(attempt([_user([_part(_USER)])]), _USER)

    def said(role: str, text: str, **more: Any) -> Message:
        return {"role": role, "content": [_part(text)] if list_only else text, **more}

    user, answer, system = said("user", _USER), said("assistant", _ANSWER), said("system", _SYSTEM)
    has_system = _shows(attempt([system, user]), _SYSTEM)
    later = said("system", _LATER)
    arguments, no_content = _call_shape(attempt, user, said("tool", "1", tool_call_id=_CALL_ID, name=_NAME))
    return Capabilities(
        system=has_system,
        later_systems=all(
            _shows(attempt(messages), _LATER)
            for messages in ([system, later, user] if has_system else [user, later, user], [user, later, user])
        ),
        developer=_names(source, "developer") and _shows(attempt([said("developer", _SYSTEM), user]), _SYSTEM),
        list_roles=frozenset(role for role, where in _list_probes(user, answer).items() if _takes_list(attempt, where)),
        list_only=list_only,
        tools=_shows(attempt([user], tools=[_tool()]), _NAME),
        calls=_shows_calls(attempt, user, arguments, no_content),
        object_arguments=isinstance(arguments, dict),
        null_with_calls=no_content is None,
        reasoning_key=_reasoning_key(attempt, user, answer),
        thinking_switch=_has_switch(attempt, user),
    )


def _shows(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text.lower() for word in words)


def _names(source: str, role: str) -> bool:
    return f"'{role}'" in source or f'"{role}"' in source


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
    return {"type": "function", "function": {"name": _NAME, "description": "d", "parameters": parameters}}


def _list_probes(user: Message, answer: Message) -> Mapping[str, list[Message]]:
    """For each role a conversation that ends with a message of that role, its content still to be filled in."""
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": ""}
    return {
        "user": [_user("")],
        "system": [user, {"role": "system", "content": ""}],
        "assistant": [user, {"role": "assistant", "content": ""}],
        "tool": [user, {"role": "assistant", "content": "", "tool_calls": [call]}, result],
    }


def _takes_list(attempt: Try, conversation: list[Message]) -> bool:
    """Whether two parts come out as their texts alone, and not as a list is printed."""
    *before, last = conversation
    messages = [*before, {**last, "content": [_part(_ANSWER), _part(_SECOND)]}]
    if last["role"] == "system":
        messages.reverse()
    text = attempt(messages)
    if text is None or not _shows(text, _ANSWER, _SECOND):
        return False
    between = text.lower()
    return "text" not in between[between.index(_ANSWER) : between.index(_SECOND)]


def _call_shape(attempt: Try, user: Message, result: Message) -> tuple[dict[str, str] | str, str | None]:
    """How a call must look for its arguments to come out whole: an object or JSON text, beside empty or no content.

    An object must not come out as Python prints it, nor text as a string within JSON.
    """
    shapes: list[tuple[dict[str, str] | str, str | None]] = [
        (arguments, content) for arguments in ({_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}') for content in ("", None)
    ]
    for arguments, content in shapes:
        call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        text = attempt([user, answer, result], tools=[_tool()])
        if text is not None and _shows(text, _VALUE) and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text:
            return arguments, content
    return shapes[0]


def _shows_calls(attempt: Try, user: Message, arguments: Any, content: str | None) -> bool:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _SECOND}
    return _shows(attempt([user, answer, result]), _VALUE, _SECOND)


def _reasoning_key(attempt: Try, user: Message, answer: Message) -> str | None:
    keys = ("reasoning_content", "thinking", "reasoning")
    return next((key for key in keys if _shows(attempt([user, {**answer, key: _THOUGHT}]), _THOUGHT)), None)


def _has_switch(attempt: Try, user: Message) -> bool:
    on, off = (attempt([user], add_generation_prompt=True, enable_thinking=value) for value in (True, False))
    return on is not None and off is not None and on != off
