"""From messages or text to token ids. Pure and possibly slow; routes run it in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from app.api.context import Api
from app.api.messages import turns_of
from app.api.schemas.chat import ChatRequest
from app.api.tools import definitions, offered, with_tools
from app.engine.service import InferenceService
from app.errors import ContextLengthExceeded, InvalidParameter

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer


class SurelyTooLong(ContextLengthExceeded):
    """A text that cannot fit, however it is cut into tokens; nobody had to cut it to know."""

    def __init__(self, fewest_tokens: int, context_tokens: int, *, param: str) -> None:
        super().__init__(fewest_tokens, context_tokens, param=param)
        self.args = (str(self).replace(f"has {fewest_tokens}", f"has at least {fewest_tokens}", 1),)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as text and as tokens, and where its turns begin.

    `in_thought`: the client began a thought that the answer goes on with.
    """

    text: str
    tokens: tuple[int, ...]
    turn_starts: tuple[int, ...]
    in_thought: bool


def chat_prompt(body: ChatRequest, api: Api, now: datetime) -> ChatPrompt:
    """Render and tokenize a conversation; what users and tools say stays text."""
    text = chat_text(body, api.service, now, guarded=True)
    tokens = prompt_tokens(text, api, param="messages")
    check_fits(tokens, api, param="messages")
    last = body.messages[-1]
    in_thought = last.role == "assistant" and bool(last.reasoning_content or last.reasoning) and not last.content
    return ChatPrompt(text, tokens, api.turn_marks.starts(tokens), in_thought)


def chat_text(body: ChatRequest, service: InferenceService, now: datetime, *, guarded: bool = False) -> str:
    """The rendered conversation, ready for the answer.

    An assistant message at the end is continued, not followed, unless `continue_final_message` is false; as in
    llama-server, `add_generation_prompt` has no say in that.
    """
    turns, tools = with_tools(turns_of(body.messages), definitions(offered(body)), service)
    last = body.messages[-1]
    if body.continue_final_message and (last.role != "assistant" or last.tool_calls):
        raise InvalidParameter(
            "continue_final_message needs a last message by the assistant, with text", param="continue_final_message"
        )
    return service.template.render(
        turns,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is not False,
        guarded=guarded,
        now=now,
        **template_variables(body),
    )


#: Names that mean something else to the renderer.
RESERVED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "guarded", "now")


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """chat_template_kwargs, and what other fields say to the template."""
    variables = dict(body.chat_template_kwargs or {})
    for name in RESERVED:
        if name in variables:
            raise InvalidParameter(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def prompt_tokens(text: str, api: Api, *, param: str) -> tuple[int, ...]:
    """`text_tokens`, of text that is not far too long to fit."""
    check_may_fit(text, api, param=param)
    return text_tokens(text, api.service.tokenizer)


def text_tokens(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
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


def check_fits(tokens: Sequence[int], api: Api, *, param: str) -> None:
    """Refuse prompts that leave no room for one token. Longer answers than fit are cut and end with `length`."""
    n_ctx = api.service.info.n_ctx
    if len(tokens) >= n_ctx:
        raise ContextLengthExceeded(len(tokens), n_ctx, param=param)


#: A text with more characters than this per token of context is probably too long: its beginning is tried first.
CHARS_PER_TOKEN = 8
#: Tokens by which the beginning of a text alone may have more than it has as a part of the whole.
CUT_TOKENS = 64


def check_may_fit(text: str, api: Api, *, param: str) -> None:
    """Refuse text that is far too long without the work of tokenizing all of it."""
    n_ctx, tokenizer = api.service.info.n_ctx, api.service.tokenizer
    fewest = tokenizer.fewest_tokens(text)
    n_chars = CHARS_PER_TOKEN * (n_ctx + CUT_TOKENS)
    if fewest < n_ctx and len(text) > n_chars:
        fewest = len(tokenizer.encode(text[:n_chars], add_special=False, parse_special=True)) - CUT_TOKENS
    if fewest >= n_ctx:
        raise SurelyTooLong(fewest, n_ctx, param=param)
