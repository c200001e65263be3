"""Grammars of parameters that stand in tags: text as it is, every other value as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.engine.text.grammar_parts import Marks, is_text, json_rule, only_texts, param_of, quoted
from app.errors import InvalidParameter

#: The name of a rule, perhaps with attributes, and its right side.
Rule = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes a parameter: `opening`, with its name for `{name}` and whether its value is text for
    `{is_text}`; the value; `closing`. `tag`: what all its tags begin with.
    """

    opening: str
    closing: str
    tag: str = ""


CODER = Notation("<parameter={name}>\n", "\n</parameter>\n")
GLM = Notation("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n")
MINIMAX = Notation('<parameter name="{name}">', "</parameter>\n")
DSML = Notation('<｜DSML｜parameter name="{name}" string="{is_text}">', "</｜DSML｜parameter>\n", "｜DSML｜")


def parameters(
    i: int, name: str, schema: Mapping[str, Any], more: dict[str, str], marks: Marks, notation: Notation
) -> str:
    """A function's parameters in tags: those required first, in the order of the schema."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    parts = []
    for k, key in enumerate(sorted(properties, key=lambda key: key not in required)):
        rule, value = f"value_{i}_{k}", properties[key]
        as_text = is_text(value) or only_texts(value) is not None
        opening = notation.opening.format(name=key, is_text="true" if as_text else "false")
        closing = spelt(notation.closing, marks)
        if is_text(value):
            (head, text), tail = _add_text(rule, value, param_of(name), notation.closing, marks)
            more[head] = text
        elif (texts := only_texts(value)) is not None:
            more[rule], tail = " | ".join(map(quoted, texts)), closing
        else:
            local = {"$defs": schema.get("$defs", {}), **value} if isinstance(value, dict) else {}
            more[rule], tail = json_rule(json.dumps(local), param_of(name)), closing
        parameter = f"{spelt(opening, marks)} {rule} {tail}".rstrip()
        parts.append(parameter if key in required else f"({parameter})?")
    return " ".join(parts)


def _add_text(rule: str, schema: Mapping[str, Any], param: str, closing: str, marks: Marks) -> tuple[Rule, str]:
    """A rule for text up to the closing tag, and what stands behind it. A control token ends text by itself."""
    for keyword in ("pattern", "format"):
        if keyword in schema:
            raise InvalidParameter(
                f"{param} has the keyword {keyword}, which calls of this model cannot be held to; leave it out or use "
                f"tool_choice auto",
                param=param,
            )
    return text_up_to(rule, schema, closing, marks)


def text_up_to(rule: str, schema: Mapping[str, Any], closing: str, marks: Marks) -> tuple[Rule, str]:
    """A rule for any text of the schema's lengths up to `closing`, and what stands behind it.

    A rule of text takes all it can; a control token is no text and ends it, otherwise the rule itself knows its end.
    """
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    times = "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"
    control = next((found for found in _TAG.finditer(closing) if marks.is_control(found[0])), None)
    if control is None:
        return (f"{rule}[suffix={quoted(closing)}]", f"/(?s:.{times})/"), ""
    before = re.escape(closing[: control.start()]).replace("/", r"\/")
    return (rule, f"/(?s:.{times}){before}/"), spelt(closing[control.start() :], marks)


#: What may be a token of its own within the tags of parameters.
_TAG = re.compile(r"</?[a-z_:]+>|｜DSML｜|<\|\"\|>")


def spelt(text: str, marks: Marks) -> str:
    """Text as the grammar has it, tags in it that are control tokens by those."""
    parts = []
    at = 0
    for found in _TAG.finditer(text):
        if marks.is_control(found[0]):
            parts += [quoted(text[at : found.start()])] if found.start() > at else []
            parts.append(marks.literal(found[0]))
            at = found.end()
    return " ".join([*parts, *([quoted(text[at:])] if at < len(text) else [])])
