"""Calls and their results told in plain words, for chat templates that know neither.

Such a template leaves the calls out that an assistant made, and some refuse what tools returned; the model would answer
a conversation that never was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.engine.text.conversation import text_of

Turn = dict[str, Any]

#: The turns that tell what a function returned; the second is OpenAI's older name.
RESULT_ROLES = ("tool", "function")


def has_calls(turns: Sequence[Turn]) -> bool:
    return any(turn["role"] in RESULT_ROLES or turn.get("tool_calls") for turn in turns)


def told_in_words(turns: Sequence[Turn]) -> list[Turn]:
    """The same conversation of text alone: calls in the form in which the model is asked to make them, results in turns
    of the user, together with what the user said next."""
    told: list[Turn] = []
    names: dict[str, str] = {}  # of functions, by the id of their call
    waiting: list[Turn] = []  # results that no turn has told yet
    for turn in turns:
        if turn["role"] in RESULT_ROLES:
            waiting.append(turn)
            continue
        if waiting:
            results, waiting = results_text(waiting, names), []
            if turn["role"] == "user":
                turn = {**turn, "content": f"{results}\n\n{text_of(turn.get('content') or '')}"}
            else:
                told.append({"role": "user", "content": results})
        if calls := turn.get("tool_calls"):
            names.update((call["id"], call["function"]["name"]) for call in calls)
            turn = with_calls_as_text(turn)
        told.append(turn)
    if waiting:
        told.append({"role": "user", "content": results_text(waiting, names)})
    return told


def with_calls_as_text(turn: Turn) -> Turn:
    calls = [
        {"name": call["function"]["name"], "arguments": as_object(call["function"].get("arguments"))}
        for call in turn["tool_calls"]
    ]
    said = text_of(turn.get("content") or "")
    text = json.dumps({"tool_calls": calls}, ensure_ascii=False)
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**rest, "content": f"{said}\n\n{text}" if said else text}


def results_text(turns: Sequence[Turn], names: dict[str, str]) -> str:
    """What tools returned, in order, each under its function's name where that is known."""
    results = []
    for turn in turns:
        name = turn.get("name") or names.get(turn.get("tool_call_id") or "")
        content = text_of(turn.get("content") or "")
        results.append({"name": name, "content": content} if name else {"content": content})
    return json.dumps({"tool_results": results}, ensure_ascii=False)


def as_object(arguments: Any) -> Any:
    """Arguments as the object they are; text that is none stays text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
