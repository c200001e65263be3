"""The response object: what was asked, and what has come of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from app.api.choice import Choice
from app.api.errors import error_body
from app.api.schemas.responses import ResponsesRequest
from app.api.usage import usage
from app.engine.request import SamplingParams

#: Told as they were given.
ECHOED = ("instructions", "metadata", "max_output_tokens", "previous_response_id", "user", "prompt_cache_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What of a response does not change while it is made."""

    id: str
    model: str
    body: ResponsesRequest
    sampling: SamplingParams
    n_prompt: int
    created_unix: int = field(default_factory=lambda: int(time.time()))

    def response(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        choice: Choice | None = None,
        error: Exception | None = None,
        incomplete_reason: str | None = None,
    ) -> dict[str, Any]:
        """The object at one moment; `choice` is the answer once it is over."""
        body = self.body
        reasoning, text = body.reasoning, body.text
        chosen_form = None if text is None or text.format is None else text.format.model_dump(by_alias=True)
        told: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_unix,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "error": None if error is None else _error(error),
            "incomplete_details": None if incomplete_reason is None else {"reason": incomplete_reason},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": self.sampling.temperature,
            "text": {
                "format": chosen_form or {"type": "text"},
                "verbosity": (text.verbosity if text else None) or "medium",
            },
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if choice is None else self._usage(choice),
        }
        return told | {name: getattr(body, name) for name in ECHOED} | {"metadata": body.metadata or {}}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        counts = usage(self.n_prompt, [choice], [choice])
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }


def _error(error: Exception) -> dict[str, Any]:
    told = error_body(error)["error"]
    return {"code": told["code"] or "server_error", "message": told["message"]}
