"""What all formats of tool calls share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.engine.text.calls.readers import Begun

#: The offered tools: name -> JSON schema of the arguments.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an offered tool. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Taken:
    """Calls at the head of a text, and how many of its characters they are. No calls: markup around calls."""

    calls: tuple[Call, ...]
    n_chars: int


class NoCall(Exception):
    """What began like a call is none: it is text like any other."""


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of an offered tool begins. `id` is the model's own, where it writes one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of the arguments of the call that began last; all of it is JSON."""

    text: str


#: Reads calls at the head of a text that begins with one of the family's openings. None: more text is needed.
#: With `is_final` no more comes. Raises NoCall.
Take = Callable[[str, Tools, bool], Taken | None]
#: The call of an offered tool whose arguments begin, at the head of such a text, or behind the arguments that end at a
#: place in it. None: not clear yet, or to be read as a whole.
Begin = Callable[[str, int, Tools], "Begun | None"]
#: Where a call ends whose arguments end at a place in the text. None: more is needed; with True no more comes.
Tail = Callable[[str, int, bool], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How one family marks its calls.

    `signs`: texts of which a template of this family has at least one. `openings` begin a call or stand around calls;
    `heads` do so only where nothing was said before. `markers` must show in the text though they are control tokens.
    `id_chars`: letters and digits that the id of a call must have, where the family's templates insist on a number.
    `begin` tells calls while they are written; what ends them then is `tail`, or, for lists of calls, what `take` says.
    """

    name: str
    signs: tuple[str, ...]
    openings: tuple[str, ...]
    take: Take
    heads: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    id_chars: int | None = None
    begin: Begin | None = None
    tail: Tail | None = None


#: Line breaks in strings are forgiven.
_decoder = json.JSONDecoder(strict=False)
_SPACES = " \t\r\n"


def skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACES:
        at += 1
    return at


def json_at(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `at`, and where it ends; None when it is not whole, or none at all."""
    try:
        return _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def may_become(text: str, at: int, tag: str) -> bool:
    """Whether `tag` may still appear at `at` when more text comes."""
    return tag.startswith(text[at:]) and len(text) - at < len(tag)


def behind(text: str, at: int, closing: str, *, is_final: bool) -> int | None:
    """Where a call ends whose `closing` tag, perhaps forgotten, is due behind white space. None: not clear yet."""
    after = skip_spaces(text, at)
    if text.startswith(closing, after):
        return after + len(closing)
    if not is_final and may_become(text, after, closing):
        return None
    return at


#: What may stand behind the arguments in the object of a call: other members with plain values, and its end.
_REST = re.compile(r'\s*(?:,\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[^"\s{}\[\],]+)\s*)*\}')
_LONGEST_REST = 256


def object_end(text: str, at: int, is_final: bool) -> int | None:
    """Where the object ends whose arguments end at `at`; right there if what follows is not its end. None: not clear
    yet."""
    rest = _REST.match(text, at)
    if rest is not None:
        return rest.end()
    may_follow = len(text) - at < _LONGEST_REST and text[at:].lstrip()[:1] in ("", ",")
    return None if may_follow and not is_final else at


#: The head of a call that is a JSON object, its name the first group, behind what `between` matches; and what stands
#: between the arguments of one call and the next object in a list.
OBJECT_HEAD = r'{between}\{{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
NEXT_IN_LIST = _REST.pattern + r"\s*[,;]\s*"


def wait(is_final: bool) -> None | Taken:
    """For a call that is not whole: more is needed. Raises NoCall when no more comes."""
    if is_final:
        raise NoCall
    return None


def call_of(value: Any, tools: Tools) -> Call:
    """The call that a JSON object describes, whatever its family calls the parts. Raises NoCall."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise NoCall
    name = next((value[key] for key in ("name", "tool_name", "function") if key in value), None)
    arguments: Any = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
    return named_call(name, arguments, tools)


def named_call(name: Any, arguments: Any, tools: Tools) -> Call:
    """Raises NoCall for a tool that nobody offered, and for arguments that are no object."""
    if isinstance(arguments, str):
        found = json_at(arguments.strip() or "{}", 0)
        arguments = None if found is None else found[0]
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        raise NoCall
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def typed_value(raw: str, schema: Any) -> Any:
    """A value that was written without quotes: text where the schema says so, else JSON if it is that."""
    types = types_of(schema)
    if types == {"string"}:
        return raw
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return raw if isinstance(value, str) and '"' not in raw else value


def parameter_schema(tools: Tools, name: str, parameter: str) -> Any:
    properties = tools.get(name, {}).get("properties")
    return properties.get(parameter, {}) if isinstance(properties, Mapping) else {}


def types_of(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return set(map(str, given))
    if isinstance(schema.get("enum"), list):
        return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
    return set()
