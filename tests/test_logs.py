"""One line per record, with request ids, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from app import logs

log = logging.getLogger("app.some.room")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The root logger is everyone's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_text() -> None:
    out = io.StringIO()
    logs.setup(stream=out)
    with logs.for_request("r1"):
        log.info("done: %s", "well", extra={"tokens": 3, "ttft_s": 0.123456, "finish": "stop it"})
    log.debug("not shown")
    line = out.getvalue()
    assert line.endswith(' info    some.room: done: well request_id=r1 tokens=3 ttft_s=0.1235 finish="stop it"\n')
    assert line.count("\n") == 1


def test_json() -> None:
    out = io.StringIO()
    logs.setup(as_json=True, verbose=1, stream=out)
    log.debug("a\nb", extra={"request_id": "r2", "path": object})
    record = json.loads(out.getvalue())
    assert record["message"] == "a\nb"
    assert (record["level"], record["logger"], record["request_id"]) == ("debug", "app.some.room", "r2")
    assert record["path"] == str(object)


def test_input_cannot_forge_a_record() -> None:
    out = io.StringIO()
    logs.setup(stream=out)
    log.warning("bad name: %s", "x\n00:00:00 error: forged")
    assert out.getvalue().count("\n") == 1


def test_exceptions_carry_their_traceback() -> None:
    out = io.StringIO()
    logs.setup(as_json=True, stream=out)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    assert "ValueError: why" in json.loads(out.getvalue())["exception"]


def test_the_id_ends_with_its_request() -> None:
    with logs.for_request("outer"):
        with logs.for_request("inner"):
            assert logs.request_id.get() == "inner"
        assert logs.request_id.get() == "outer"
    assert logs.request_id.get() == ""
