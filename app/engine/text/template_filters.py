"""The filters, operators and text methods that templates may use, each charged for its work before it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2 import filters, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import escape

from app.engine.text.meter import Meter, TemplateLimit

#: Where the meter of a rendering lies in its context; no template can spell this name.
METER_KEY = "\0meter"

#: The widest field, deepest indentation or longest list that a number in a template may ask for.
_MOST_FILL = 10_000
_MOST_BITS = 4096
_STEPS_PER_FILTER = 4
_WIDE_FIELD = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{5})|\{[^{}]*(?:\d{5}|\{)")
#: The same behind the name in `%(name)99999d`, which may hold letters and brackets of its own.
_WIDE_NAMED_FIELD = re.compile(r"\)[^%)a-zA-Z]*(?:\*|\d{5})")


def meter_of(context: Context) -> Meter:
    meter: Meter = context.parent[METER_KEY]
    return meter


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the tools of model authors write it: nothing escaped for HTML, keys in the order they have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def check_fill(n: object) -> None:
    """Refuse a number that would make a short text or list very long."""
    if isinstance(n, int) and n > _MOST_FILL:
        raise TemplateLimit(f"it asks for a fill of {n}")


def check_format(text: str) -> None:
    """Refuse format strings with very wide fields, or widths that come from values."""
    if _WIDE_FIELD.search(text) or ("%(" in text and _WIDE_NAMED_FIELD.search(text)):
        raise TemplateLimit("it asks for a very wide field")


def check_replace(meter: Meter, text: str, old: str, new: str, *_: object) -> None:
    """Charge for the longest text that replacing can make."""
    meter.chars(len(text) + max(0, len(new) - len(old)) * text.count(old))


def check_join(meter: Meter, glue: str, parts: Iterable[Any]) -> list[str]:
    """The parts as texts, once their joint length is known to be allowed."""
    texts = []
    n_chars = 0
    for part in parts:
        texts.append(meter.text(part))
        n_chars += len(texts[-1]) + len(glue)
        if n_chars > meter.max_chars:
            raise TemplateLimit(f"it makes a text of more than {meter.max_chars} characters")
    return texts


def _indent_lines(meter: Meter, text: str, width: int | str = 4, *_: Any, **__: Any) -> None:
    check_fill(width)
    meter.chars(len(text) + (len(width) if isinstance(width, str) else width) * (1 + text.count("\n")))


def _json_size(meter: Meter, value: Any, *args: Any, **options: Any) -> None:
    meter.walk(value)
    for option in (*args, *options.values()):
        if isinstance(option, int) and option > 64 or isinstance(option, str | tuple) and len(option) > 64:
            raise TemplateLimit("it asks for a very wide JSON text")


#: What is looked at before a filter runs: (meter, value, arguments).
_GUARDS: Mapping[str, Callable[..., object]] = {
    "batch": lambda meter, value, n=0, *_, **__: check_fill(n),
    "center": lambda meter, value, n=0, *_, **__: check_fill(n),
    "format": lambda meter, value, *_, **__: check_format(str(value)),
    "indent": lambda meter, value, *args, **options: _indent_lines(meter, str(value), *args, **options),
    "replace": lambda meter, value, old, new, *_, **__: check_replace(meter, str(value), str(old), str(new)),
    "round": lambda meter, value, n=0, *_, **__: check_fill(abs(n) * 100),
    "slice": lambda meter, value, n=0, *_, **__: check_fill(n),
    "tojson": _json_size,
    "string": lambda meter, value: meter.text(value),
    "list": lambda meter, value: meter.charge(len(value) if isinstance(value, str) else 0),
}

_PLAIN = (
    "abs attr batch capitalize center count d default dictsort first float format groupby indent int items last "
    "length list lower map max min reject rejectattr replace reverse round select selectattr slice sort string "
    "title trim truncate unique upper urlencode wordcount"
).split()


def metered_filters() -> dict[str, Callable[..., Any]]:
    """All filters by name, ready for an environment."""
    known: dict[str, Callable[..., Any]] = {name: _metered(name, filters.FILTERS[name]) for name in _PLAIN}
    known["tojson"] = _metered("tojson", to_json)
    known["from_json"] = _metered("from_json", json.loads)
    known["e"] = known["escape"] = _metered("escape", lambda value: str(escape(str(value))))
    known["safe"] = _metered("safe", str)  # nothing is escaped by itself, so nothing needs to be marked as safe
    known["join"] = _join
    known["sum"] = _sum
    return known


def _metered(name: str, base: Callable[..., Any]) -> Callable[..., Any]:
    guard = _GUARDS.get(name)
    wants = getattr(base, "jinja_pass_arg", None)

    @pass_context
    @wraps(base, updated=())
    def run(context: Context, *args: Any, **options: Any) -> Any:
        meter = meter_of(context)
        meter.charge(_STEPS_PER_FILTER)
        if guard is not None:
            guard(meter, *args, **options)
        if wants is None:
            return meter.made(base(*args, **options))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[wants.name]
        return meter.made(base(first, *args, **options))

    return run


def _attribute(context: Context, values: Iterable[Any], attribute: str | int | None) -> Iterable[Any]:
    if attribute is None:
        return values
    return map(filters.make_attrgetter(context.environment, attribute), values)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    return str(d).join(check_join(meter_of(context), str(d), _attribute(context, value, attribute)))


@pass_context
def _sum(context: Context, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    """Numbers alone: adding lists one after the other would be quadratic."""
    meter = meter_of(context)
    total: Any = start
    for number in _attribute(context, value, attribute):
        if not isinstance(total, int | float) or not isinstance(number, int | float):
            raise TypeError("sum adds numbers only")
        meter.charge(1)
        total = _bounded(total + number)
    return total


def operate(meter: Meter, operator: str, left: Any, right: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
    """A binary operator, once its result is known to be small enough."""
    if operator == "%" and isinstance(left, str):
        check_format(left)
    elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
        _times(meter, left, right)
    elif operator == "*" and isinstance(right, str | list | tuple) and isinstance(left, int):
        _times(meter, right, left)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        meter.chars(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        meter.items(len(left) + len(right))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * max(right, 0) > _MOST_BITS:
            raise TemplateLimit("it makes a very large number")
    return meter.made(_bounded(table[operator](left, right)))


def _times(meter: Meter, value: str | list[Any] | tuple[Any, ...], n: int) -> None:
    if isinstance(value, str):
        meter.chars(len(value) * n)
    else:
        meter.items(len(value) * n)
        if value and n > 1:
            for _ in range(n):
                meter.walk(value)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise TemplateLimit("it makes a very large number")
    return value


_CHEAP_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper".split()
)
_FILLING_METHODS = frozenset("center ljust rjust zfill expandtabs".split())


def check_text_method(meter: Meter, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Look at a call of a method of a text before it is made; the arguments to call it with."""
    meter.charge(1 + len(text) // 64)
    if name in _CHEAP_METHODS:
        return args
    if name in _FILLING_METHODS:
        for number in args:
            check_fill(number)
        meter.chars(len(text) * (int(args[0]) if name == "expandtabs" and args else 1))
    elif name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        check_replace(meter, text, args[0], args[1])
    elif name == "join" and len(args) == 1:
        parts = list(args[0])
        meter.chars(sum(len(part) + len(text) for part in parts if isinstance(part, str)))
        return (parts,)
    elif name in ("format", "format_map"):
        check_format(text)
    else:
        raise TypeError(f"a text has no method {name!r} here")
    return args


def bound_text(function: Any, environment: SandboxedEnvironment) -> tuple[str, str] | None:
    """The text and the name of the method, if `function` is a method of a text."""
    function = getattr(function, "__wrapped__", function)
    owner = getattr(function, "__self__", None)
    return (owner, function.__name__) if isinstance(owner, str) else None
