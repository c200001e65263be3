"""Parts of grammars in Lark's notation that all families of calls share."""

from __future__ import annotations

import json
from typing import Any, Protocol

from app.engine.text.schema_check import checked_schema


class Marks(Protocol):
    """How a vocabulary has the tags of a family."""

    def literal(self, tag: str) -> str:
        """A tag as the grammar names it: by the token that stands for it, or as text."""
        ...

    def is_control(self, tag: str) -> bool:
        """Whether a token stands for it that is no text."""
        ...


#: Keeps white space between the parts of arguments in bounds.
_GUIDANCE = {"whitespace_flexible": True, "whitespace_pattern": r"[ ]?|\n[ \t]{0,32}", "coerce_one_of": True}

#: Text as the grammar has it.
quoted = json.dumps


def json_rule(source: str, param: str) -> str:
    """The right side of a rule for JSON that matches the schema in this JSON text. Raises InvalidParameter."""
    return f"%json {json.dumps({**checked_schema(source, param), 'x-guidance': _GUIDANCE})}"


def param_of(name: str) -> str:
    return f"tools.{name}.parameters"


def only_texts(schema: Any) -> list[str] | None:
    """The only texts that match, where the schema lists texts alone."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    return (
        values
        if isinstance(values, list) and values and all(value and isinstance(value, str) for value in values)
        else None
    )


def is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
