"""Makes a conversation fit a template that is pickier than the API: system turns, alternation, developer role.

Templates differ in what they refuse and in what they drop without a word. So the conversation is offered in a few
forms, the given one first, and the first that renders without losing an instruction is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from app.api.schemas.chat import ContentPart, Message
from app.errors import InvalidParameter, RequestError

Turn = dict[str, Any]
Render = Callable[[Sequence[Turn]], str]
#: Between texts that were separate messages.
JOINT = "\n\n"


def turns_of(messages: Sequence[Message], *, knows_developer: bool) -> list[Turn]:
    """Messages as templates expect them: content a string, call arguments an object, no absent keys but `content`."""
    return [turn_of(message, f"messages[{i}]", knows_developer) for i, message in enumerate(messages)]


def turn_of(message: Message, where: str, knows_developer: bool) -> Turn:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    if message.content is None and role not in ("assistant", "tool", "function"):
        raise InvalidParameter(f"a {message.role} message needs content", param=f"{where}.content")
    turn: Turn = {"role": role, "content": text_of(message.content, f"{where}.content")}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        turn["reasoning_content"] = reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return turn


def text_of(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """The text of a content field; the texts of its parts follow each other without anything between."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def part_text(part: ContentPart, where: str) -> str:
    match part.type:
        case "text" | "input_text" | "output_text" if part.text is not None:
            return part.text
        case "refusal" if part.refusal is not None:
            return part.refusal
        case "text" | "input_text" | "output_text" | "refusal":
            raise InvalidParameter(f"a part of type {part.type!r} needs its text", param=where)
    raise InvalidParameter(
        f"content of type {part.type!r} is not supported by this model; send text", param=where, code="unsupported"
    )


def arguments_of(arguments: str | dict[str, Any] | None) -> Any:
    """Templates walk arguments as an object; what is not JSON stays the string it is."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def render(turns: Sequence[Turn], render_once: Render) -> str:
    """Render the first form of the conversation that the template takes whole. Raises the first form's error."""
    first_error: RequestError | None = None
    for form in forms(turns):
        try:
            text = render_once(form)
        except RequestError as error:
            first_error = first_error or error
            continue
        if keeps_instructions(turns, text):
            return text
    raise first_error or InvalidParameter("the model's chat template drops system messages", param="messages")


def forms(turns: Sequence[Turn]) -> Iterator[Sequence[Turn]]:
    """The conversation as given, then with its system turns in front, then inside the first user turn, then paired."""
    yield turns
    systems = [turn["content"] for turn in turns if turn["role"] in ("system", "developer")]
    others = [turn for turn in turns if turn["role"] not in ("system", "developer")]
    folded = others
    if systems:
        instructions = JOINT.join(text for text in systems if text)
        yield [{"role": "system", "content": instructions}, *others]
        folded = fold_into_user(instructions, others)
        yield folded
    yield pair(folded)


def fold_into_user(instructions: str, turns: Sequence[Turn]) -> list[Turn]:
    """Instructions at the head of the first user turn; a turn of their own when nobody has spoken yet."""
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            merged = {**turn, "content": JOINT.join(text for text in (instructions, turn["content"]) if text)}
            return [*turns[:i], merged, *turns[i + 1 :]]
    return [{"role": "user", "content": instructions}, *turns]


def pair(turns: Sequence[Turn]) -> list[Turn]:
    """Neighbouring turns of one role become one turn; those with calls or results stay as they are."""
    paired: list[Turn] = []
    for turn in turns:
        last = paired[-1] if paired else None
        mergeable = last is not None and last["role"] == turn["role"] and turn["role"] in ("user", "assistant")
        if last is not None and mergeable and not (last.get("tool_calls") or turn.get("tool_calls")):
            paired[-1] = {**last, "content": JOINT.join(text for text in (last["content"], turn["content"]) if text)}
        else:
            paired.append(turn)
    return paired


def keeps_instructions(turns: Sequence[Turn], text: str) -> bool:
    """Whether every system and developer text is in the rendered prompt."""
    return all(turn["content"].strip() in text for turn in turns if turn["role"] in ("system", "developer"))
