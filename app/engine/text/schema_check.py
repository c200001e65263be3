"""What a JSON schema must be before it is compiled: in bounds, without loops of references, honest about `oneOf`.

A grammar can say that one of several branches matches, but not that the others do not. So `oneOf` is taken only where
its branches exclude each other by type, or by a constant that each of them requires.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from app.errors import InvalidParameter

#: Deepest nesting of a schema's own JSON, and how many references in a row lead nowhere.
_DEEPEST, _MOST_REFERENCES = 120, 64
_TYPES = ("null", "boolean", "number", "string", "array", "object")
#: Names below which schemas stand by name, and not as keywords.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST_NUMBER = 1e15
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_DATA = ("const", "enum", "default", "example", "examples")


def checked_schema(source: str, param: str) -> Any:
    """The schema of a JSON text. Raises InvalidParameter that names the keyword that is wrong."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"{param} is no JSON that can be read: {error}", param=param) from error
    if schema is False:
        raise InvalidParameter(f"{param} is the schema false, which nothing can match", param=param)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{param} must be a JSON schema, an object", param=param)
    parts = list(_schemas(schema, param))
    for where, part in parts:
        _check_part(part, schema, where, param)
    for _, part in parts:
        _narrow(part)
    return schema


def _narrow(part: dict[str, Any]) -> None:
    """Keep numbers within what every reader can hold, and let classes of characters in patterns be ASCII; counts that
    are written as 2.0 are 2."""
    for key in _COUNTS:
        if isinstance(part.get(key), float) and part[key].is_integer():
            part[key] = int(part[key])
    names = part.get("type")
    if "number" in ([names] if isinstance(names, str) else names or ()) and not any(key in part for key in _BOUNDS):
        part.update(minimum=-_MOST_NUMBER, maximum=_MOST_NUMBER)
    if isinstance(part.get("pattern"), str):
        part["pattern"] = ascii_classes(part["pattern"])


def ascii_classes(pattern: str) -> str:
    r"""A regular expression whose `\d` and `\w` are ASCII, as in JavaScript."""
    made: list[str] = []
    in_class = escaped = False
    for char in pattern:
        if escaped:
            members = _CLASSES.get(char)
            made.append(f"\\{char}" if members is None else members if in_class else f"[{members}]")
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            in_class = char == "[" or (in_class and char != "]")
            made.append(char)
    return "".join(made) + "\\" * escaped


def _schemas(schema: Any, param: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema and where it stands, without recursion. Raises InvalidParameter for what is nested too deep."""
    waiting: list[tuple[str, Any, int, bool]] = [("#", schema, 0, False)]
    while waiting:
        where, part, depth, is_map = waiting.pop()
        if depth > _DEEPEST:
            raise InvalidParameter(
                f"{param} is nested more than {_DEEPEST} levels deep at {where[:60]}...", param=param
            )
        if isinstance(part, dict):
            if not is_map:
                yield where, part
            waiting += [
                (f"{where}/{key}", value, depth + 1, not is_map and key in _MAPS)
                for key, value in part.items()
                if is_map or key not in _DATA
            ]
        elif isinstance(part, list):
            waiting += [(f"{where}/{i}", value, depth + 1, False) for i, value in enumerate(part)]


def _check_part(part: Mapping[str, Any], root: Any, where: str, param: str) -> None:
    if "x-guidance" in part:
        raise InvalidParameter(f"{param} has the keyword x-guidance at {where}, which is not supported", param=param)
    if "$ref" in part:
        resolved(part, root, where, param)
    branches = part.get("oneOf")
    if isinstance(branches, list):
        for one, other in combinations(branches, 2):
            if not _exclude(resolved(one, root, where, param), resolved(other, root, where, param), root, param):
                raise InvalidParameter(
                    f"{param} has oneOf at {where} with branches that may both match, which is not supported; "
                    f"use anyOf, or give each branch a type or a required constant of its own",
                    param=param,
                )


def resolved(part: Any, root: Any, where: str, param: str) -> Any:
    """The schema that a chain of references ends at."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
            return part
        part = _target(part["$ref"], root, where, param)
    raise InvalidParameter(f"{param} has a $ref at {where} that only leads back to itself", param=param)


def _target(reference: str, root: Any, where: str, param: str) -> Any:
    if reference != "#" and not reference.startswith("#/"):
        raise InvalidParameter(
            f"{param} has the $ref {reference[:80]!r} at {where}; only references into the schema itself are followed",
            param=param,
        )
    found = root
    for step in reference.split("/")[1:]:
        step = _unescaped(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            raise InvalidParameter(
                f"{param} has the $ref {reference[:80]!r} at {where}, which does not exist", param=param
            )
    return found


def _unescaped(step: str) -> str:
    """A step of a reference without the escapes of an address, such as `%25`."""
    data = _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), step.encode("utf-8", "replace"))
    return data.decode("utf-8", "replace")


def _exclude(one: Any, other: Any, root: Any, param: str) -> bool:
    """Whether no value can match both."""
    if not _types(one) & _types(other):
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(value == candidate for value in values for candidate in others)
    return _types(one) == _types(other) == {"object"} and _have_own_constants(one, other, root, param)


def _have_own_constants(one: Any, other: Any, root: Any, param: str) -> bool:
    for name in set(_required(one)) & set(_required(other)):
        pair = [resolved(part["properties"].get(name), root, name, param) for part in (one, other)]
        values, others = map(_values, pair)
        if values is not None and others is not None and not any(value in others for value in values):
            return True
    return False


def _required(part: Any) -> list[str]:
    required = part.get("required")
    return required if isinstance(required, list) and isinstance(part.get("properties"), dict) else []


def _types(part: Any) -> set[str]:
    """JSON types that may match; an integer is a number."""
    if not isinstance(part, dict):
        return set(_TYPES) if part is True else set()
    values = _values(part)
    if values is not None:
        return {_type_of(value) for value in values}
    given = part.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else list(_TYPES)
    return {"number" if name == "integer" else str(name) for name in names}


def _values(part: Any) -> list[Any] | None:
    """The only values that match, where the schema lists them."""
    if not isinstance(part, dict):
        return None
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
