"""A chat request, understood: what the engine is asked, and how its answers are read.

Every dialect of conversations is translated into a `ChatRequest` and goes on from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from app.api.choice import Choice
from app.api.constraints import check, in_messages, thought_of
from app.api.context import Api
from app.api.generation import Running, choice_ids
from app.api.params import Wanted, chat_params
from app.api.prompt import ChatPrompt, chat_prompt
from app.api.schemas.chat import ChatRequest
from app.api.tools import ToolUse, check_each, tool_use
from app.engine.request import Thought
from app.engine.text.reasoning import ReasoningFormat, reasoning_parser
from app.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Understood:
    """Everything that can be refused has been. `thinking`: how thoughts are found in answers, None: they stay there."""

    params: Wanted
    prompt: ChatPrompt
    use: ToolUse | None
    thinking: ReasoningFormat | None
    thought: Thought | None

    def submit(self, api: Api, request_id: str) -> Running:
        """Admit all choices or none. Call it on the event loop; raises what the engine says to the first it refuses."""
        requests = self.params.requests(
            self.prompt.tokens,
            choice_ids(request_id, self.params.n),
            message_starts=self.prompt.turn_starts,
            thought=self.thought,
        )
        return Running.submit(api, request_id, requests)

    def new_choice(self, index: int = 0, *, keep_tokens: bool = False) -> Choice:
        """A choice that sorts what comes into thoughts, text and calls."""
        parser = None
        if self.thinking is not None:
            prompt = self.prompt
            parser = reasoning_parser(
                self.thinking, prompt.text, has_tools=self.use is not None, inside=prompt.in_thought
            )
        return Choice(index, keep_tokens, parser, None if self.use is None else self.use.parser())


def understood(body: ChatRequest, api: Api) -> Understood:
    """All about the request that may take long to find out; run it in a thread. Raises what is wrong with it."""
    params = chat_params(body, api)
    prompt = chat_prompt(body, api, datetime.now())
    params, use = held_to_form(params, body, prompt, api)
    keeps_thoughts = (body.reasoning_format or api.options.reasoning_format) == "none"
    has_headers = api.answers_in_messages and (use is not None or params.constraint is not None)
    return Understood(
        params,
        prompt,
        use,
        None if keeps_thoughts and not has_headers else api.thinking,
        None if params.constraint is None else thought_of(api.thinking, prompt),
    )


def held_to_form(params: Wanted, body: ChatRequest, prompt: ChatPrompt, api: Api) -> tuple[Wanted, ToolUse | None]:
    """Compile the form the answer must have. Raises InvalidParameter for what is wrong with it or with the tools."""
    constraint = params.constraint
    use = tool_use(body, api, constraint)
    if use is not None and use.most != 0:
        constraint = use.constraint
    elif constraint is not None and api.answers_in_messages:
        constraint = in_messages(constraint, prompt, api)
    try:
        check(constraint, api)
    except InvalidParameter:
        if use is not None:
            check_each(use.tools, api)  # says which of them it is
        raise
    return replace(params, constraint=constraint), use
