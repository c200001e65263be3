"""From messages or text to token ids. Pure and possibly slow; routes run it in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from app.api import messages
from app.api.messages import Turn
from app.api.schemas.chat import ChatRequest
from app.engine.service import InferenceService
from app.errors import InvalidParameter

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer


def chat_text(body: ChatRequest, service: InferenceService, now: datetime) -> str:
    """The rendered conversation, ready for the answer. An assistant message at the end is continued, not followed."""
    template = service.template
    turns = messages.turns_of(body.messages, knows_developer="developer" in template.source)
    variables = template_variables(body)
    open_answer = body.add_generation_prompt is not False
    prefill = prefill_of(body, turns)

    def once(form: Sequence[Turn]) -> str:
        return template.render(list(form), add_generation_prompt=open_answer and prefill is None, now=now, **variables)

    text = messages.render(turns, once)
    return text if prefill is None else cut_after(text, prefill)


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """chat_template_kwargs, and what other fields say to the template."""
    variables = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "now", "bos_token", "eos_token"):
        if name in variables:
            raise InvalidParameter(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def prefill_of(body: ChatRequest, turns: Sequence[Turn]) -> str | None:
    """The text of a last assistant message that the answer goes on from, or None."""
    last = turns[-1]
    continued = last["role"] == "assistant" and last["content"].strip() and not last.get("tool_calls")
    if body.continue_final_message and not continued:
        raise InvalidParameter(
            "continue_final_message needs a last message by the assistant, with text", param="continue_final_message"
        )
    if body.continue_final_message is False or body.add_generation_prompt is False and not body.continue_final_message:
        return None
    return last["content"] if continued else None


def cut_after(text: str, prefill: str) -> str:
    """The prompt up to the end of the prefill, as the template wrote it: the turn's end marker goes away."""
    for written in (prefill, prefill.strip()):
        at = text.rfind(written)
        if at >= 0:
            return text[: at + len(written)]
    raise InvalidParameter(
        "the model's chat template changes assistant messages; it cannot be continued", param="messages"
    )


def prompt_tokens(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens of text to go on from: special tokens in it count as such, and BOS stands in front once.

    Nothing at all begins with BOS, also in models that do without it otherwise; it may stay empty if there is none.
    """
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    wants_bos = tokenizer.add_bos or not tokens
    if wants_bos and tokenizer.bos is not None and tokens[:1] != [tokenizer.bos]:
        tokens = [tokenizer.bos, *tokens]
    return tuple(tokens)


def checked_ids(tokens: Sequence[int], tokenizer: Tokenizer, where: str) -> tuple[int, ...]:
    """Token ids as they were given; nothing is put in front. Raises for ids outside the vocabulary."""
    highest = max(tokens, default=0)
    if highest >= tokenizer.vocab_size:
        raise InvalidParameter(f"{where} has token {highest}, the vocabulary has {tokenizer.vocab_size}", param=where)
    return tuple(tokens)
