"""JSON schemas as grammars of Gemma's notation: names bare, text between quotes of its own, everything else as in JSON.

A keyword that this notation cannot be held to is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from app.engine.text.grammar_parts import Marks, json_rule, quoted
from app.engine.text.schema_check import checked_schema, resolved
from app.engine.text.tag_grammar import text_up_to
from app.errors import InvalidParameter

Rules = dict[str, str]

#: Keywords with no say in what may be written.
_WORDS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated"}
)
_KNOWN: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_PLAIN = ("integer", "number", "boolean", "null")
_PLAIN_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_DEEPEST = 24


class BareGrammar:
    """Writes rules for one tool's arguments; their names begin with `prefix`. `quote` is the quotes' tag."""

    def __init__(self, prefix: str, quote: str, param: str, marks: Marks) -> None:
        self.rules: Rules = {}
        self._prefix = prefix
        self._tag = quote
        self._quote = marks.literal(quote)
        self._marks = marks
        self._param = param
        self._names: dict[str, str] = {}  # rules of referenced schemas
        self._root: Any = {}

    def start(self, schema: Mapping[str, Any]) -> str:
        """The name of the rule for arguments that match the schema. Raises InvalidParameter."""
        self._root = checked_schema(json.dumps(schema), self._param)
        return self._rule(self._root, 0)

    def _rule(self, schema: Any, depth: int) -> str:
        """The name of a new rule, or of that for a schema which is referred to again."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference in self._names:
            return self._names[reference]
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules[name] = ""
        if reference is not None:
            self._names[reference] = name
            schema = resolved(schema, self._root, "#", self._param)
        if depth > _DEEPEST:
            raise InvalidParameter(f"{self._param} is nested more than {_DEEPEST} levels deep", param=self._param)
        self.rules[name] = self._written(schema, depth + 1)
        return name

    def _written(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, dict):
            return self._any(depth)
        if "const" in schema:
            return self._value(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return " | ".join(map(self._value, schema["enum"]))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                self._check(schema, {word})
                return " | ".join(self._rule(branch, depth) for branch in schema[word])
        names = schema.get("type")
        if names is None and "properties" in schema:
            names = "object"
        if names is None:
            self._check(schema, set())
            return self._any(depth)
        listed = names if isinstance(names, list) else [names]
        return " | ".join(self._of_type(name, schema, depth, alone=len(listed) == 1) for name in listed)

    def _of_type(self, name: str, schema: dict[str, Any], depth: int, *, alone: bool) -> str:
        if name in _PLAIN:
            if alone:
                self._check(schema, {"type", *_PLAIN_KEYWORDS})
            return self._json({key: value for key, value in schema.items() if key in _PLAIN_KEYWORDS} | {"type": name})
        known = _KNOWN.get(name)
        if known is None:
            raise InvalidParameter(f"{self._param} has the type {name!r}, which is none", param=self._param)
        if alone:
            self._check(schema, {"type", *known})
        return {"string": self._string, "array": self._array, "object": self._object}[name](schema, depth)

    def _check(self, schema: dict[str, Any], known: set[str]) -> None:
        for key in schema:
            if key not in known and key not in _WORDS:
                raise InvalidParameter(
                    f"{self._param} has the keyword {key}, which calls of this model cannot be held to; leave it out "
                    f"or use tool_choice auto",
                    param=self._param,
                )

    def _json(self, schema: Any) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules[name] = json_rule(json.dumps(schema), self._param)
        return name

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {quoted(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, dict | list):
            raise InvalidParameter(
                f"{self._param} has a constant object or list, which calls of this model cannot be held to",
                param=self._param,
            )
        return json.dumps(json.dumps(value))

    def _string(self, schema: dict[str, Any], depth: int) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        (head, text), rest = text_up_to(name, schema, self._tag, self._marks)
        self.rules[head] = text
        return f"{self._quote} {name} {rest}"

    def _array(self, schema: dict[str, Any], depth: int) -> str:
        item = self._rule(schema.get("items", True), depth)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[]"'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else max(high - 1, 0)}}}'
        return f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"'

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        """Members in the order of the schema, those required first."""
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = [name for name in schema.get("required") or [] if name in properties]
        members = [self._member(name, properties[name], depth) for name in required]
        optional = [self._member(name, value, depth) for name, value in properties.items() if name not in required]
        if members:
            return " ".join(['"{"', ' "," '.join(members), *(f'("," {member})?' for member in optional), '"}"'])
        chains = [
            " ".join([member, *(f'("," {later})?' for later in optional[i + 1 :])]) for i, member in enumerate(optional)
        ]
        return f'"{{" ({" | ".join(chains)})? "}}"' if chains else '"{}"'

    def _member(self, name: str, schema: Any, depth: int) -> str:
        return f"{quoted(f'{name}:')} {self._rule(schema, depth)}"

    def _any(self, depth: int) -> str:
        """Any value that has no members of its own."""
        return " | ".join([self._string({}, depth), self._json({"type": list(_PLAIN)})])
