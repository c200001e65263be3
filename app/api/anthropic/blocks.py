"""From the content blocks of Anthropic's messages to chat messages, in the order in which they were said."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from app.api.schemas.anthropic import Block, MessageParam
from app.api.schemas.chat import ContentPart, FunctionCall, Message, ToolCall
from app.errors import InvalidParameter

#: The first line that some clients put before their instructions. It differs in every request and is not for the model:
#: with it, no prompt would share its beginning with the one before.
BILLING_HEADER = "x-anthropic-billing-header:"
PARAGRAPH = "\n\n"
#: What a model is told of a picture in a tool's result. Refusing it would end a conversation for good: the result stays
#: in every later request.
UNSEEN_IMAGE = "[an image that this model cannot see]"

#: What a thought is signed with. One that is not shown has itself in its signature, so that it comes back.
SIGNATURE = "tandem"


def sealed(thought: str) -> str:
    """The signature of a thought that is not shown."""
    return f"{SIGNATURE}:{base64.b64encode(thought.encode()).decode()}"


def unsealed(signature: str) -> str:
    """The thought in a signature; empty if there is none, or if it is not ours."""
    head, _, body = signature.partition(":")
    if head != SIGNATURE:
        return ""
    try:
        return base64.b64decode(body, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def without_billing(text: str) -> str:
    """Instructions without the line that is only for Anthropic's accounts."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_HEADER) else text


def instructions(given: str | Sequence[Block], where: str) -> str:
    """The text of a system prompt; blocks are paragraphs."""
    texts = [given] if isinstance(given, str) else [text_of(block, f"{where}[{i}]") for i, block in enumerate(given)]
    return PARAGRAPH.join(filter(None, map(without_billing, texts)))


def chat_messages(messages: Sequence[MessageParam]) -> list[Message]:
    """All turns as chat messages. Results of tools become messages of their own; turns of one role in a row become
    one. Raises InvalidParameter for a block that is wrong or that this model cannot read."""
    names: dict[str, str] = {}  # of tools, by the id of their call
    turns: list[Message] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        for turn in TURNS[message.role](message.content, where, names):
            if turns and may_join(turns[-1], turn):
                turns[-1] = joined(turns[-1], turn)
            else:
                turns.append(turn)
    return turns


def system_turns(content: str | Sequence[Block], where: str, names: dict[str, str]) -> Iterator[Message]:
    del names
    if text := instructions(content, where):
        yield Message(role="system", content=text)


def user_turns(content: str | Sequence[Block], where: str, names: dict[str, str]) -> Iterator[Message]:
    if isinstance(content, str):
        yield Message(role="user", content=content)
        return
    parts: list[ContentPart] = []
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        if block.type != "tool_result":
            parts.append(ContentPart(type="text", text=text_of(block, at)))
            continue
        if parts:
            yield user_turn(parts)
            parts = []
        yield tool_turn(block, at, names)
    if parts or not content:
        yield user_turn(parts)


def user_turn(parts: list[ContentPart]) -> Message:
    """One block is the same as a string."""
    return Message(role="user", content=parts if len(parts) > 1 else "".join(part.text or "" for part in parts))


def tool_turn(block: Block, where: str, names: Mapping[str, str]) -> Message:
    call_id = needed(block, "tool_use_id", where)
    given = block.content or ""
    texts = [given] if isinstance(given, str) else [seen(part, f"{where}.content[{i}]") for i, part in enumerate(given)]
    text = "\n".join(texts)
    if block.is_error and not text.lstrip("<").lower().startswith(("error", "tool_use_error")):
        text = f"Error: {text}"
    return Message(role="tool", content=text, tool_call_id=call_id, name=names.get(call_id))


def seen(block: Block, where: str) -> str:
    """A part of a tool's result as a model without eyes gets to know it."""
    if block.type == "image":
        return UNSEEN_IMAGE
    if block.type == "tool_reference":
        return block.tool_name or ""
    return text_of(block, where)


def assistant_turns(content: str | Sequence[Block], where: str, names: dict[str, str]) -> Iterator[Message]:
    if isinstance(content, str):
        yield Message(role="assistant", content=content)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        if block.type == "thinking":
            thoughts.append(needed(block, "thinking", at) or unsealed(block.signature or ""))
        elif block.type == "tool_use":
            call_id, name = needed(block, "id", at), needed(block, "name", at)
            names[call_id] = name
            calls.append(ToolCall(id=call_id, function=FunctionCall(name=name, arguments=block.input or {})))
        elif block.type != "redacted_thinking":  # that can be read by nobody but who redacted it
            texts.append(text_of(block, at))
    yield Message(
        role="assistant",
        content=PARAGRAPH.join(texts),
        reasoning_content=PARAGRAPH.join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


TURNS: Mapping[str, Callable[[str | Sequence[Block], str, dict[str, str]], Iterator[Message]]] = {
    "system": system_turns,
    "user": user_turns,
    "assistant": assistant_turns,
}


def text_of(block: Block, where: str) -> str:
    """The text of a block that is text, whatever else it may be called. Raises InvalidParameter for all others."""
    if block.type == "text":
        return needed(block, "text", where)
    if block.type == "document":
        return document_text(block, where)
    if block.type == "search_result":
        content = block.content or []
        texts = [content] if isinstance(content, str) else [text_of(part, where) for part in content]
        return "\n".join(filter(None, [block.title, str(block.source or ""), *texts]))
    hint = "this model cannot see; send text" if block.type == "image" else "send text, tool_use and tool_result blocks"
    raise InvalidParameter(
        f"{where} is of type {block.type[:80]!r}, which is not supported here: {hint}",
        param=where,
        code="unsupported",
    )


def document_text(block: Block, where: str) -> str:
    """A document that is plain text, under its title."""
    source: Any = block.source if isinstance(block.source, dict) else {}
    text = source.get("data") if source.get("type") == "text" else None
    if source.get("type") == "content":
        text = source.get("content")
        if isinstance(text, list):
            text = "\n".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
    if not isinstance(text, str):
        raise InvalidParameter(
            f"{where} is a document that is not plain text; send its text", param=f"{where}.source", code="unsupported"
        )
    return "\n".join(filter(None, [block.title, block.context, text]))


def needed(block: Block, name: str, where: str) -> str:
    """A field that blocks of this type must have."""
    value = getattr(block, name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{where}: a block of type {block.type!r} needs its {name}", param=f"{where}.{name}")
    return value


def may_join(before: Message, turn: Message) -> bool:
    return before.role == turn.role and turn.role in ("user", "assistant")


def joined(before: Message, turn: Message) -> Message:
    """Two turns of one role as one, as Anthropic's models are shown them."""
    if turn.role == "user":
        return user_turn([*parts_of(before), *parts_of(turn)])
    thoughts = filter(None, [before.reasoning_content, turn.reasoning_content])
    texts = filter(None, [str(before.content or ""), str(turn.content or "")])
    calls = [*(before.tool_calls or ()), *(turn.tool_calls or ())]
    return Message(
        role="assistant",
        content=PARAGRAPH.join(texts),
        reasoning_content=PARAGRAPH.join(thoughts) or None,
        tool_calls=calls or None,
    )


def parts_of(message: Message) -> list[ContentPart]:
    content = message.content
    return content if isinstance(content, list) else [ContentPart(type="text", text=content or "")]
