"""How settings are declared and parsed: one table per command, four sources, no silence about a mistake.

A settings class is a frozen dataclass whose fields are made by `option`. `parse` fills it from the flags of the
command line, else from the field's `TANDEM_*` variable, else from the file named by `--config`, else by default.
Whatever is unknown or makes no sense is a ConfigError that names its source.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from app.errors import ConfigError

ENV_PREFIX = "TANDEM_"

#: Variables of the build and of the tests; a program that is started beside them must not stumble over them.
FOREIGN_VARIABLES = frozenset({"TANDEM_NO_NATIVE", "TANDEM_GOLDENS", "TANDEM_GGML_BASE", "TANDEM_TEMPLATES"})

T = TypeVar("T")
Convert = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One flag. `name` is the field's; `flags` are as typed; the first long one names its twins elsewhere.

    `off_flag` makes it a switch: `flags` turn it on, `off_flag` (which may be empty) turns it off. With `positional`
    the value may also stand on the command line without a flag, under that name.
    """

    name: str = ""
    flags: tuple[str, ...]
    help: str
    panel: str
    convert: Convert
    metavar: str = ""
    default: Any = None
    off_flag: str | None = None
    positional: str = ""
    counts: bool = False

    @property
    def flag(self) -> str:
        """The flag by which messages name this option."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def key(self) -> str:
        """The name in a settings file."""
        return self.flag.removeprefix("--")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return ENV_PREFIX + self.key.replace("-", "_").upper()


def option(default: Any, *flags: str, help: str, panel: str, **details: Any) -> Any:
    """A dataclass field that is also a flag."""
    details.setdefault("convert", text)
    made = Option(flags=flags, help=help, panel=panel, default=default, **details)
    return dataclasses.field(default=default, metadata={"option": made})


def switch(default: bool, *flags: str, help: str, panel: str, off_flag: str = "") -> Any:
    """A flag without a value."""
    return option(default, *flags, help=help, panel=panel, off_flag=off_flag, convert=boolean)


def options_of(settings_class: type) -> list[Option]:
    """The flags of a settings class: its own in the order they are declared, then the inherited ones."""
    bases = [base for base in settings_class.__bases__ if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    fields = sorted(dataclasses.fields(settings_class), key=lambda field: field.name in inherited)
    return [dataclasses.replace(field.metadata["option"], name=field.name) for field in fields]


def parse(
    settings_class: type[T],
    flags: Mapping[str, str],
    *,
    table: str,
    known: Iterable[type] = (),
    environ: Mapping[str, str] | None = None,
) -> T:
    """Settings from all sources, the nearest first.

    `flags` maps field names to what was typed. `table` is this command's table in the file. `known` are the settings
    classes of the other commands: their variables may be set as well.
    """
    environ = os.environ if environ is None else environ
    options = options_of(settings_class)
    _refuse_unknown_variables(environ, [settings_class, *known])
    values: dict[str, Any] = {}
    for item in options:
        if item.name in flags:
            values[item.name] = _converted(item, flags[item.name], item.flag)
        elif item.variable in environ:
            values[item.name] = _converted(item, environ[item.variable], item.variable)
    config = values.get("config")
    if config is not None:
        by_key = {item.key: item for item in options}
        tables = {table, *(settings_table(other) for other in known)}
        for key, value in _read_file(config, table, by_key, tables).items():
            name = by_key[key].name
            values.setdefault(name, _converted(by_key[key], value, f"{config}: {key}"))
    return settings_class(**values)


def _converted(item: Option, value: str, source: str) -> Any:
    try:
        return item.convert(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def _refuse_unknown_variables(environ: Mapping[str, str], classes: Iterable[type]) -> None:
    known = {item.variable for settings_class in classes for item in options_of(settings_class)} | FOREIGN_VARIABLES
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"the environment sets {name}, which is no setting of Tandem; unset it or mend its name")


def settings_table(settings_class: type) -> str:
    """The table of a command's settings class in a settings file: ServeSettings stands in [serve]."""
    return settings_class.__name__.removesuffix("Settings").lower()


def _read_file(file: Path, table: str, known: Container[str], tables: Collection[str]) -> dict[str, str]:
    """This command's table of a TOML file, as text by key. Underscores in keys are taken for dashes."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {file}: {error}") from error
    except RecursionError:
        raise ConfigError(f"cannot read the settings file {file}: its values are nested too deeply") from None
    for name, value in content.items():
        if not isinstance(value, dict) and name != table:
            raise ConfigError(f"{file}: {name!r} stands outside a command's table; put it below [{table}]")
        if name not in tables:
            raise ConfigError(f"{file}: [{name}] is no command's table; there are {', '.join(sorted(tables))}")
    section = content.get(table, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: [{table}] must be a table of settings")
    found = {}
    for name, value in section.items():
        key = name.replace("_", "-")
        if key not in known:
            raise ConfigError(f"{file}: {name!r} is no setting of `tandem {table}`")
        if key in found:
            raise ConfigError(f"{file}: {key!r} is set twice in [{table}], with a dash and with an underscore")
        found[key] = _as_text(value)
    return found


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


# What a value may look like. Each raises ValueError with the rule that was broken.


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def words(value: str) -> tuple[str, ...]:
    """Names between commas."""
    parts = tuple(part.strip() for part in value.split(","))
    if not all(parts):
        raise ValueError(f"{value!r} has an empty part; expected names between commas")
    return parts


def numbers(value: str) -> tuple[float, ...]:
    """Proportions between commas, none below zero and not all of them zero."""
    try:
        parts = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise ValueError(f"{value!r} is not a list of numbers between commas") from None
    if not all(0 <= part < float("inf") for part in parts) or not any(parts):
        raise ValueError(f"{value!r} must hold finite numbers from 0 up, at least one of them above 0")
    return parts


_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *(?:([kmgt])(?:i?b)?)?", re.IGNORECASE)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(unit: str) -> Convert:
    """A size in bytes: a number, maybe with a fraction, and K, M, G or T (KiB, KB, ...); without one it is `unit`."""

    def convert(value: str) -> int:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is no size; write a number of {unit.upper()}iB, or one such as 500M or 1.5G")
        n_bytes = int(float(match[1]) * _UNITS[(match[2] or unit).lower()])
        if n_bytes <= 0:
            raise ValueError(f"{value!r} is out of range; it must be above 0")
        return n_bytes

    return convert


def boolean(value: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if value.lower() not in known:
        raise ValueError(f"{value!r} is neither true nor false (1 or 0)")
    return known[value.lower()]


def integer(low: int, high: int | None = None) -> Convert:
    def convert(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a whole number") from None
        _check_range(number, low, high)
        return number

    return convert


def real(low: float, high: float | None = None) -> Convert:
    def convert(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a number") from None
        _check_range(number, low, high)
        return number

    return convert


def _check_range(number: float, low: float, high: float | None) -> None:
    if not low <= number <= (float("inf") if high is None else high) or number == float("inf"):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{number} is out of range; it must be {allowed}")


_MAX_CPUS = 4096


def cpu_range(value: str) -> tuple[int, ...]:
    """`LO-HI`, both included; either may be missing: from the first, or one CPU alone (`3`). Raises ValueError."""
    low, dash, high = value.partition("-")
    try:
        first = int(low) if low or not dash else 0
        last = int(high) if dash else first
    except ValueError:
        raise ValueError(f"{value!r} is no range of CPUs; write 0-3") from None
    if not 0 <= first <= last < _MAX_CPUS:
        raise ValueError(f"{value!r} is no range of CPUs: it must rise, from 0 to at most {_MAX_CPUS - 1}")
    return tuple(range(first, last + 1))


def cpu_mask(value: str) -> tuple[int, ...]:
    """Hexadecimal digits, with or without 0x; bit n is CPU n. Raises ValueError."""
    try:
        mask = int(value, 16)
    except ValueError:
        raise ValueError(f"{value!r} is no mask of CPUs; write it in hexadecimal, such as 0xf") from None
    if not 0 < mask < 1 << _MAX_CPUS:
        raise ValueError(f"{value!r} names no CPU from 0 to {_MAX_CPUS - 1}")
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def choice(*allowed: str, refused: Mapping[str, str] | None = None) -> Convert:
    """One of a few words. `refused` are words others know, with the reason they do not work here."""

    def convert(value: str) -> str:
        if refused and value in refused:
            raise ValueError(f"{value!r} {refused[value]}; use {' or '.join(allowed)}")
        if value not in allowed:
            raise ValueError(f"{value!r} is unknown; use {' or '.join(allowed)}")
        return value

    return convert


def path(value: str) -> Path:
    return Path(text(value)).expanduser()


def existing_file(value: str) -> Path:
    found = path(value)
    if not found.is_file():
        raise ValueError(f"there is no file {found}")
    return found


def existing_directory(value: str) -> Path:
    found = path(value)
    if not found.is_dir():
        raise ValueError(f"there is no directory {found}")
    return found


def endpoint(value: str) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    if "://" in value:
        raise ValueError(f"{value!r} has a scheme; write host:port alone, such as 192.168.1.20:50052")
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{value!r} is not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{value!r} has an IPv6 host without brackets; write [{host}]:{port}")
    return value


def endpoints(value: str) -> tuple[str, ...]:
    parts = tuple(endpoint(part) for part in words(value))
    if len(set(parts)) != len(parts):
        raise ValueError(f"{value!r} names the same worker twice")
    return parts
