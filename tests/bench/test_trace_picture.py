"""Pictures of traces: everything stands within them, and what is not there is said in one line."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.engine.trace import Span, TracedUbatch, trace_events
from bench.trace_picture import draw, of_request, read

_SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["RPC0[192.168.100.101:50052] layers 0-14", "RPC1[192.168.100.102:50052] layers 15-29 + head"]


def traced() -> list[TracedUbatch]:
    spans = (Span(0, 5.0, 5.1, 5.4, 0, False), Span(1, 5.4, 5.5, 5.9, 0, False))
    return [TracedUbatch(n, 0, 8, (f"request-{n}",), 5.0, 6.0, spans) for n in (7, 8)]


def test_labels_stand_beside_the_rows_and_within_the_picture() -> None:
    events = list(trace_events(traced(), NAMES))
    text = draw(events, 0.0, 900_000.0, "title")
    picture = ElementTree.fromstring(text)
    labels = {e.text: float(e.get("x", "nan")) for e in picture.iter(f"{_SVG}text")}
    rows = [float(e.get("x", "nan")) for e in picture.iter(f"{_SVG}rect") if e.get("fill") == "#eee"]
    assert len(rows) == 2
    assert all(labels[name] + 6 * len(name) < min(rows) for name in NAMES)
    assert labels["900 ms"] + 6 * len("900 ms") / 2 < float(picture.get("width", "nan"))
    fills = {e.get("fill", "") for e in picture.iter(f"{_SVG}rect")} - {"100%"}
    assert all(re.fullmatch("#([0-9a-f]{3}|[0-9a-f]{6})", fill) for fill in fills)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    events = list(trace_events(traced(), NAMES))
    own = of_request(events, "request-8")
    assert {e["args"]["ubatch"] for e in own if e["ph"] == "X"} == {8}
    with pytest.raises(SystemExit, match=r"no ubatch of request 'nonsense' is in the trace.*request-7, request-8$"):
        of_request(events, "nonsense")
    with pytest.raises(SystemExit, match=r"cannot be read: No such file"):
        read(tmp_path / "missing.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit, match="is no trace"):
        read(tmp_path / "other.json")
