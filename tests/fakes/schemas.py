"""Random JSON schemas that can be met, over every keyword that constrained answers promise. The seed is the schema."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = ("red", "green", "blue", 'a "quoted" word', "näh", "漢字", "tab\there", "")
_PATTERNS = (
    "^[a-z]{1,6}$",
    "^(ab|cd)+x?$".replace("+", "{1,3}"),
    "^\\d{2}-\\d{3}$",
    "^[A-F0-9]{4}$",
    "^v[0-9](\\.[0-9])?$",
)
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(seed: int) -> Schema:
    """An object schema, up to three levels deep, bounded everywhere so that answers end by themselves."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if "$ref" in repr(schema):
        schema["$defs"] = {"Leaf": _leaf(rng), "Tree": _tree()}
    return schema


def _tree() -> Schema:
    children = {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Tree"}}
    return {
        "type": "object",
        "properties": {"v": {"enum": ["r", "g"]}, "kids": children},
        "required": ["v"],
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0:
        return _leaf(rng)
    kinds: list[Callable[[random.Random, int], Schema]] = [_object, _array, _union, _one_of, _reference, _all_of]
    return rng.choice([*kinds, *[lambda rng, depth: _leaf(rng)] * 6])(rng, depth)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice((_string, _integer, _number, _choice, _constant, _plain))(rng)


def _string(rng: random.Random) -> Schema:
    kind = rng.randrange(3)
    if kind == 0:
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 8)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    return {"type": "string", "format": rng.choice(_FORMATS)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randrange(-200, 200)
    high = low + rng.randrange(500)
    bounds: list[Schema] = [
        {"minimum": low, "maximum": high},
        {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1},
        {"minimum": low - 0.5, "maximum": high + 0.5},
        {"minimum": 0, "maximum": 9999, "multipleOf": rng.choice((2, 5, 10))},
    ]
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: random.Random) -> Schema:
    low = rng.randrange(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randrange(1, 100)}


def _choice(rng: random.Random) -> Schema:
    values: list[Any] = [*_WORDS, 1, -7, 2.5, True, None]
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _constant(rng: random.Random) -> Schema:
    return {"const": rng.choice([*_WORDS, 0, 1.0, -3, False, None, [1, "a"], {"k": []}])}


def _plain(rng: random.Random) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "b", "c", "name with space", 'quote"d', "ключ", "x-y"], rng.randrange(1, 5))
    required = [name for name in names if rng.random() < 0.6]
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth - 1) for name in names}}
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(3)
    schema: Schema = {"type": "array", "minItems": low, "maxItems": low + rng.randrange(3)}
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_leaf(rng), _leaf(rng)], "items": False}
    return {**schema, "items": _any(rng, depth - 1)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}


def _one_of(rng: random.Random, depth: int) -> Schema:
    tagged = [
        {**_object(rng, depth - 1), "required": ["kind"]} | {"properties": {"kind": {"const": kind}, "v": _leaf(rng)}}
        for kind in ("one", "two")
    ]
    return {"oneOf": rng.choice([tagged, [_string(rng), _integer(rng)], [{"type": "null"}, _array(rng, depth - 1)]])}


def _reference(rng: random.Random, depth: int) -> Schema:
    del depth
    return {"$ref": rng.choice(["#/$defs/Leaf", "#/$defs/Tree"])}


def _all_of(rng: random.Random, depth: int) -> Schema:
    del depth
    low = rng.randrange(100)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randrange(1, 50)}]}
