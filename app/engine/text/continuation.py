"""Continues an answer that the client began: the prompt ends inside the assistant's turn.

Templates close every turn, and change what they print (trim it, split thoughts off). So the answer is rendered as marks
and what the client wrote takes their place afterwards, unchanged.
"""

from __future__ import annotations

from app.engine.text.conversation import Capabilities, Message, text_of
from app.errors import RequestError

#: No template and no user writes these.
_CONTENT_MARK = "\ufdd0content\ufdd1"
_REASONING_MARK = "\ufdd0reasoning\ufdd1"

#: Characters at the end of the earlier turns by which their end is found again.
_LONGEST_TAIL, _SHORTEST_TAIL = 256, 4


def marked_answer(able: Capabilities) -> Message:
    """The message to render in place of the answer."""
    content = [{"type": "text", "text": _CONTENT_MARK}] if able.list_only else _CONTENT_MARK
    message: Message = {"role": "assistant", "content": content}
    if able.reasoning_key is not None:
        message[able.reasoning_key] = _REASONING_MARK
    return message


def parts_of(answer: Message) -> tuple[str, str]:
    """Reasoning and content of an answer."""
    return answer.get("reasoning_content", ""), text_of(answer["content"])


def continued(before: str, marked: str, reasoning: str, content: str) -> str:
    """The prompt up to the last character of the answer.

    `before` is the rendering of the turns before it, `marked` the same with the marked answer behind. An answer that is
    all reasoning stays inside it. Raises RequestError when the template does not show the answer.
    """
    content_at = marked.rfind(_CONTENT_MARK)
    if content_at < 0:
        raise RequestError(
            "the model's chat template does not show the final assistant message; it cannot be continued",
            param="messages",
            code="template_failed",
        )
    thought_at = marked.rfind(_REASONING_MARK, 0, content_at)
    head = marked[: content_at if thought_at < 0 else thought_at]
    between = "" if thought_at < 0 else marked[thought_at + len(_REASONING_MARK) : content_at]
    opening = _behind(before, head)
    if reasoning and thought_at >= 0:
        return opening + reasoning + (between + content if content else "")
    return opening + between + content


def _behind(before: str, head: str) -> str:
    """`before`, and what `head` has behind it. Templates that count messages write the earlier ones differently in a
    longer conversation, but end them alike."""
    if head.startswith(before):
        return head
    for n_chars in range(min(len(before), _LONGEST_TAIL), _SHORTEST_TAIL - 1, -1):
        at = head.rfind(before[-n_chars:])
        if at >= 0:
            return before + head[at + n_chars :]
    return head
