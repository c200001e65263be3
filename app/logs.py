"""One way to log: to stderr, one line per record, with the id of the request it belongs to.

Fields beyond the message go in `extra`; the text form appends them as key=value, the JSON form makes them members.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

#: The request this thread or task is working for; empty outside of requests.
request_id: ContextVar[str] = ContextVar("request_id", default="")

#: What every LogRecord has by itself. Anything else came as `extra`.
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "taskName"}

#: Loggers of libraries that say too much: name -> lowest level that is shown below -v -v.
_QUIET = {"uvicorn.access": logging.WARNING, "uvicorn.error": logging.WARNING, "httpx": logging.WARNING}


@contextmanager
def for_request(identifier: str) -> Iterator[None]:
    """Everything logged inside carries this request id."""
    token = request_id.set(identifier)
    try:
        yield
    finally:
        request_id.reset(token)


def setup(*, as_json: bool = False, verbose: int = 0, stream: TextIO | None = None) -> None:
    """Make the root logger write one format to stderr. Replaces whatever handlers there were."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(logging.DEBUG if verbose > 1 else level)
    for name in ("uvicorn", "uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The record's extra fields, the request id first."""
    identifier = getattr(record, "request_id", "") or request_id.get()
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD and key != "request_id"}
    return {"request_id": identifier, **extra} if identifier else extra


class TextFormatter(logging.Formatter):
    """`12:34:56.789 info  engine: message key=value`, for people."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("app.")
        fields = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():<7} {name}: {_one_line(record)}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line, for machines. `time` is seconds since the epoch."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _one_line(record: logging.LogRecord) -> str:
    """The message with line breaks made visible, so that no input can forge a second record."""
    return record.getMessage().replace("\r", "\\r").replace("\n", "\\n")


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
