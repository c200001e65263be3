"""Chat templates: messages to the prompt a model was trained on.

Templates are programs in Jinja that come with model files; they run sandboxed and metered (see `sandbox`, `meter`).
Messages are shaped before (see `conversation`) by what the template can take, which is found by trying (see `probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from app.engine.text.builtin_templates import BUILTIN_TEMPLATES, patched
from app.engine.text.continuation import continued, marked_answer, parts_of
from app.engine.text.conversation import (
    Capabilities,
    Message,
    count_instructions,
    fold_first_system,
    is_instruction,
    place_instructions,
    plain_copy,
    prepare,
    size_chars,
)
from app.engine.text.guard import Guard
from app.engine.text.meter import DEFAULT_LIMITS, Limits, Meter, TemplateLimit
from app.engine.text.probe import find_capabilities
from app.engine.text.sandbox import Sandbox, TemplateRefusal, strftime_of
from app.engine.text.template_filters import METER_KEY
from app.engine.text.vocab import as_text
from app.errors import InvalidParameter, ModelError, RequestError

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"

#: The largest known templates have 40,000; compiling takes a second for every hundred thousand.
_MAX_SOURCE_CHARS = 250_000

_LIMIT_CODE = "template_limit"

_environment = Sandbox()


class ChatTemplate:
    """One compiled template. Rendering is thread-safe and takes about a millisecond.

    `clock` gives the date that a template may print when a rendering is not told one; `monotonic` ends a rendering that
    takes longer than `limits.seconds`. Without it a rendering ends by its count of steps alone.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        for_tools: ChatTemplate | None = None,
        guard: Guard | None = None,
        limits: Limits = DEFAULT_LIMITS,
        clock: Callable[[], datetime] | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """Compile. Raises ModelError when `source` is no template. `for_tools` is used when tools are given; `guard`
        knows the control tokens that users may not write."""
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._for_tools = for_tools
        self._guard = guard
        self._limits = limits
        self._clock = clock
        self._monotonic = monotonic
        if len(source) > _MAX_SOURCE_CHARS:
            raise ModelError(
                f"the chat template cannot be used: it has {len(source)} characters, at most {_MAX_SOURCE_CHARS} are "
                f"allowed; give a shorter one with --chat-template-file"
            )
        try:
            self._template = _environment.from_string(patched(source))
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ModelError(f"the chat template cannot be used: {error.message}, line {line}") from error
        except RecursionError as error:
            raise ModelError("the chat template cannot be used: it is nested too deeply") from error

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], datetime] | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> ChatTemplate:
        """The file's template, else ChatML. A named `tool_use` template serves requests with tools, if it compiles."""
        options: dict[str, Any] = {"guard": Guard(tokenizer.control_texts), "clock": clock, "monotonic": monotonic}
        ends = _text_of_token(tokenizer, tokenizer.bos), _text_of_token(tokenizer, tokenizer.eos)
        for_tools = None
        if (named := metadata.get(f"{_KEY}.tool_use")) is not None:
            try:
                for_tools = cls(as_text(named), *ends, **options)
            except ModelError:  # the default template is there for all that this one would have done
                for_tools = None
        stored = metadata.get(_KEY)
        if stored is None:
            return for_tools or cls(BUILTIN_TEMPLATES["chatml"], *ends, **options)
        return cls(as_text(stored), *ends, for_tools=for_tools, **options)

    @property
    def for_tools(self) -> ChatTemplate:
        """The template that renders requests with tools."""
        return self._for_tools or self

    @cached_property
    def capabilities(self) -> Capabilities:
        """What this template can take; worked out at first use, by about twenty small renderings.

        Raises RequestError where even these do not end within the limits.
        """
        return find_capabilities(self.source, self._try)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = True,
        guarded: bool = False,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages.

        A final assistant message with text is continued: nothing follows its last character. With
        `continue_final_message` false it is a turn like any other. `variables` reach the template under their names.
        `guarded`: what users and tools say cannot become control tokens when this prompt is tokenized (see `guard`).

        Raises InvalidParameter with the template's own words when it refuses the messages, RequestError when it fails.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                guarded=guarded,
                now=now,
                **variables,
            )
        given = {
            **_spread(variables),
            **({"tools": plain_copy(list(tools), "tools")} if tools else {}),
            "add_generation_prompt": add_generation_prompt,
        }
        ready = prepare(messages, self.capabilities)
        if guarded and self._guard is not None:
            self._guard.protect_messages(ready)
        final = _final_answer(ready) if continue_final_message else None
        if final is not None:
            ready.pop()
            if not any(parts_of(final)):
                final = None  # an empty answer is one that has not begun
        return self._render_in_order(ready, final, given, now)

    def _render_in_order(
        self, messages: list[Message], final: Message | None, given: Mapping[str, Any], now: datetime | None
    ) -> str:
        """As given if the template takes that, else with instructions where it does."""
        able = self.capabilities
        leads = bool(messages) and is_instruction(messages[0])
        later = count_instructions(messages) > leads
        in_order = messages if able.system else fold_first_system(messages)
        if in_order is not None and (able.later_systems or not later):
            try:
                return self._render_final(in_order, final, given, now)
            except RequestError:
                if not later:
                    raise
        return self._render_final(place_instructions(messages, able), final, given, now)

    def _render_final(
        self, messages: list[Message], final: Message | None, given: Mapping[str, Any], now: datetime | None
    ) -> str:
        if final is None:
            return self.render_raw(messages, now=now, **given)
        closed = {**given, "add_generation_prompt": False}
        marked = self.render_raw([*messages, marked_answer(self.capabilities)], now=now, **closed)
        before = self.render_raw(messages, now=now, **closed) if messages else ""
        return continued(before, marked, *parts_of(final))

    def render_raw(self, messages: list[Message], *, now: datetime | None = None, **variables: Any) -> str:
        """Run the template over messages just as they are."""
        now = now or (self._clock() if self._clock is not None else None)
        dated = {} if now is None else {"strftime_now": strftime_of(now), **_dates(now)}
        meter = Meter(self._limits, size_chars(messages) + size_chars(variables), self._monotonic)
        names = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **dated,
            **variables,
            "messages": messages,
            METER_KEY: meter,
        }
        try:
            text = self._template.render(names)
            meter.chars(len(text))
        except TemplateRefusal as error:
            raise InvalidParameter(
                f"the model's chat template refuses these messages: {error}", param="messages", code="template_refused"
            ) from None
        except TemplateLimit as error:
            raise RequestError(
                f"the model's chat template does not finish within its limits: {error}", code=_LIMIT_CODE
            ) from None
        except Exception as error:  # a template can fail in any way a program can
            raise RequestError(
                f"the model's chat template fails on these messages: {_words(error)}",
                param="messages",
                code="template_failed",
            ) from error
        return text

    def _try(self, messages: list[Message], **variables: Any) -> str | None:
        """What the template makes of a probe; None when it refuses. One that does not end is not probed further."""
        try:
            return self.render_raw(messages, now=datetime(2000, 1, 1), **variables)
        except RequestError as error:
            if error.code == _LIMIT_CODE:
                raise
            return None


def _text_of_token(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _words(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__


def _dates(now: datetime) -> dict[str, str]:
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}


def _spread(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a request, with the other names under which templates look for the same things."""
    given: dict[str, Any] = plain_copy(variables, "chat_template_kwargs")
    if "reasoning_effort" in given:
        given.setdefault("reasoning_strength", given["reasoning_effort"])
    if (keep := given.pop("preserve_reasoning", None)) is not None:
        given.setdefault("preserve_thinking", bool(keep))
        for name in ("clear_thinking", "drop_thinking", "truncate_history_thinking"):
            given.setdefault(name, not keep)
    return given


def _final_answer(messages: Sequence[Message]) -> Message | None:
    last = messages[-1] if messages else None
    return last if last is not None and last["role"] == "assistant" and not last.get("tool_calls") else None
