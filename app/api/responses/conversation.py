"""From the items of a response to the messages of a chat.

Items are finer than messages: thoughts, text and calls of one turn are items of their own. Those of the assistant that
follow each other become one message again, so that the prompt is the one that the turn was generated in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from app.api.responses.tools import INPUT, flat_name
from app.api.schemas.chat import ContentPart, FunctionCall, Message, ToolCall
from app.api.schemas.responses import InputItem, InputPart
from app.errors import InvalidParameter

#: Kinds of parts that are text, and the field that has it.
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
#: Kinds of parts that tools return and no text model can look at. The model is told so: it asked for them.
SHOWN_PARTS = {"input_image": "an image", "input_file": "a file"}
#: Steps of tools that other providers run themselves; what came of them is in the messages around them.
SKIPPED = ("web_search_call", "image_generation_call", "local_shell_call", "tool_search_call", "tool_search_output")
ROLES = ("user", "assistant", "system", "developer")


@dataclass(slots=True)
class Turns:
    """The messages so far, and the assistant's message that is still growing."""

    messages: list[Message] = field(default_factory=list)
    _open: Message | None = None

    def add(self, message: Message) -> None:
        self.close()
        self.messages.append(message)

    def answer(self) -> Message:
        """The assistant's message to go on with."""
        if self._open is None:
            self._open = Message.model_construct(role="assistant", content=None)
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self.messages.append(self._open)
            self._open = None


def messages_of(items: Sequence[InputItem], instructions: str | None, n_earlier: int = 0) -> list[Message]:
    """All items as messages; the first `n_earlier` come from earlier responses. Raises InvalidParameter."""
    turns = Turns()
    if instructions:
        turns.add(Message.model_construct(role="system", content=instructions))
    for i, item in enumerate(items):
        where = f"input[{i - n_earlier}]"
        kind = item.type or "message"
        take = _ITEMS.get(kind)
        if take is not None:
            take(turns, item, where)
        elif kind not in SKIPPED:
            raise InvalidParameter(
                f"{where} is of type {kind[:80]!r}, which is not supported", param=f"{where}.type", code="unsupported"
            )
    turns.close()
    return turns.messages


def _message(turns: Turns, item: InputItem, where: str) -> None:
    if item.role not in ROLES:
        raise InvalidParameter(f"{where} needs a role: {', '.join(ROLES)}", param=f"{where}.role")
    content = _content(item, where)
    if item.role != "assistant":
        turns.add(Message.model_construct(role=item.role, content=content))
        return
    answer = turns.answer()
    if answer.tool_calls or answer.content is not None:
        turns.close()
        answer = turns.answer()
    answer.content = content


def _content(item: InputItem, where: str) -> str | list[ContentPart]:
    if item.content is None:
        raise InvalidParameter(f"{where} needs content: text or a list of parts", param=f"{where}.content")
    if isinstance(item.content, str):
        return item.content
    parts = [
        ContentPart.model_construct(type="text", text=_part_text(part, f"{where}.content[{k}]"))
        for k, part in enumerate(item.content)
    ]
    return parts[0].text or "" if len(parts) == 1 else parts


def _part_text(part: InputPart, where: str) -> str:
    name = TEXT_PARTS.get(part.type)
    text: str | None = None if name is None else getattr(part, name)
    if text is None:
        raise InvalidParameter(
            f"content of type {part.type[:80]!r} is not supported by this model; send text"
            if name is None
            else f"a part of type {part.type!r} needs its {name}",
            param=where,
            code="unsupported",
        )
    return text


def _reasoning(turns: Turns, item: InputItem, where: str) -> None:
    """A thought that only its provider can read is left to that provider."""
    parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
    thought = item.content if isinstance(item.content, str) else "\n\n".join(part.text or "" for part in parts)
    if not thought:
        return
    answer = turns.answer()
    if answer.content is not None or answer.tool_calls:
        turns.close()
        answer = turns.answer()
    answer.reasoning_content = f"{answer.reasoning_content}\n\n{thought}" if answer.reasoning_content else thought


def _function_call(turns: Turns, item: InputItem, where: str) -> None:
    arguments = item.arguments if isinstance(item.arguments, str) else json.dumps(item.arguments or {})
    _call(turns, item, where, arguments)


def _custom_call(turns: Turns, item: InputItem, where: str) -> None:
    _call(turns, item, where, json.dumps({INPUT: item.input or ""}, ensure_ascii=False))


def _call(turns: Turns, item: InputItem, where: str, arguments: str) -> None:
    if not item.name:
        raise InvalidParameter(f"{where} needs the name of what it calls", param=f"{where}.name")
    function = FunctionCall.model_construct(name=flat_name(item.name, item.namespace), arguments=arguments)
    call = ToolCall.model_construct(id=item.call_id, type="function", function=function)
    answer = turns.answer()
    answer.tool_calls = [*(answer.tool_calls or ()), call]


def _output(turns: Turns, item: InputItem, where: str) -> None:
    if isinstance(item.output, list):
        text = "\n".join(_shown(part, f"{where}.output[{k}]") for k, part in enumerate(item.output))
    elif isinstance(item.output, dict):
        text = json.dumps(item.output, ensure_ascii=False)
    else:
        text = item.output or ""
    turns.add(Message.model_construct(role="tool", content=text, tool_call_id=item.call_id))


def _shown(part: InputPart, where: str) -> str:
    thing = SHOWN_PARTS.get(part.type)
    return _part_text(part, where) if thing is None else f"[{thing} that this model cannot see]"


_ITEMS: Mapping[str, Callable[[Turns, InputItem, str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
}
