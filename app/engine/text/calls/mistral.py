"""Mistral's calls: `[TOOL_CALLS]` and a JSON list, or a name and `[ARGS]` with an object, once per call."""

from __future__ import annotations

import re

from app.engine.text.calls.base import CallFormat, Taken, Tools, call_of, json_at, named_call, skip_spaces, wait

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_HEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*[^\[\s]*\s*)?(?:\[ARGS\])?\s*(?=\{)")


def take(text: str, tools: Tools, is_final: bool) -> Taken | None:
    at = skip_spaces(text, len(OPENING))
    if at < len(text) and text[at] in "[{" and not text.startswith(ARGUMENTS, at):
        found = json_at(text, at)
        if found is None:
            return wait(is_final)
        values = found[0] if isinstance(found[0], list) else [found[0]]
        return Taken(tuple(call_of(value, tools) for value in values), found[1])
    head = _HEAD.match(text, at)
    if head is None:
        return wait(is_final)
    found = json_at(text, head.end())
    if found is None:
        return wait(is_final)
    return Taken((named_call(head[1], found[0], tools),), found[1])


FORMAT = CallFormat(
    name="mistral",
    signs=(OPENING,),
    openings=(OPENING,),
    take=take,
    markers=(OPENING, ARGUMENTS, CALL_ID),
    id_chars=9,
)
