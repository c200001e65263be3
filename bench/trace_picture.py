"""Draws a trace of `--trace` as a plain SVG: a row per stage, computing and transfers as boxes, one colour per ubatch.

`python -m bench.trace_picture trace.json picture.svg [--from-ms A --to-ms B] [--request ID]`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, ROW, TOP = 960, 150, 40, 46, 50
_LETTER = 6.5  # the width of one in 11 px, roughly


def draw(events: Sequence[Mapping[str, Any]], from_us: float, to_us: float, title: str) -> str:
    """The part of a trace between two times."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    boxes = [e for e in events if e["ph"] == "X" and e["ts"] < to_us and e["ts"] + e["dur"] > from_us]
    left = max(LEFT, 24 + _LETTER * max(map(len, names.values()), default=0))
    whole = WIDTH - left - RIGHT
    scale = whole / max(1.0, to_us - from_us)
    first = min((e["args"]["ubatch"] for e in boxes), default=0)
    height = TOP + ROW * len(names) + 40
    parts = [f'<text x="{left}" y="24" font-size="14">{escape(title)}</text>']
    for tid, name in sorted(names.items()):
        y = TOP + ROW * tid
        parts.append(f'<text x="8" y="{y + 24}">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{whole}" height="{ROW - 8}" fill="#eee"/>')
    for event in boxes:
        start, end = max(from_us, event["ts"]), min(to_us, event["ts"] + event["dur"])
        x, width, y = left + (start - from_us) * scale, (end - start) * scale, TOP + ROW * event["tid"]
        number = event["args"]["ubatch"] - first
        colour = "#999" if event["cat"] == "transfer" else _colour(number)
        label = f"{event['name']}, ubatch {event['args']['ubatch']}: {event['dur'] / 1e3:.2f} ms"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{ROW - 8}" fill="{colour}" stroke="#fff" '
            f'stroke-width="0.6"><title>{escape(label)}</title></rect>'
        )
        if width > 24 and event["cat"] == "compute":
            parts.append(f'<text x="{x + 4:.1f}" y="{y + 23}" fill="#222">{number}</text>')
    y = TOP + ROW * len(names) + 16
    for step in range(6):
        at_us = from_us + (to_us - from_us) * step / 5
        x = left + (at_us - from_us) * scale
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{(at_us - from_us) / 1e3:.0f} ms</text>')
    style = "<style>text{font:11px sans-serif;fill:#444}</style><rect width='100%' height='100%' fill='#fff'/>"
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{style}{"".join(parts)}</svg>\n'


def _colour(number: int) -> str:
    """Neighbours differ; in digits, since some programs take no other notation."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(number * 47 % 360 / 360, 0.62, 0.55))


def of_request(events: Sequence[Mapping[str, Any]], request: str) -> list[Mapping[str, Any]]:
    """The stages' names, and what ran for one request. Raises SystemExit if nothing did."""
    arcs = [e for e in events if e["ph"] == "b"]
    own = {e["id"] for e in arcs if request in e["args"]["requests"]}
    if not own:
        known = dict.fromkeys(name for e in arcs for name in e["args"]["requests"])
        some = ", ".join(list(known)[-5:]) or "none"
        raise SystemExit(f"no ubatch of request {request!r} is in the trace; the last of its {len(known)}: {some}")
    return [e for e in events if e["ph"] == "M" or e.get("args", {}).get("ubatch") in own]


def read(path: Path) -> list[Mapping[str, Any]]:
    """The events of a trace. Raises SystemExit for what is none."""
    try:
        events: list[Mapping[str, Any]] = json.loads(path.read_text())["traceEvents"]
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no trace of `--trace`") from error
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from-ms", type=float, default=None)
    parser.add_argument("--to-ms", type=float, default=None)
    parser.add_argument("--request", default=None, help="only as long as this request's ubatches ran")
    parser.add_argument("--title", default="Stages over time; gray: a boundary on its way")
    given = parser.parse_args()
    events = read(given.trace)
    if given.request is not None:
        events = of_request(events, given.request)
    times = [at for e in events if e["ph"] == "X" for at in (e["ts"], e["ts"] + e["dur"])]
    from_us = min(times, default=0.0) if given.from_ms is None else given.from_ms * 1e3
    to_us = max(times, default=1.0) if given.to_ms is None else given.to_ms * 1e3
    given.picture.write_text(draw(events, from_us, to_us, given.title))


if __name__ == "__main__":
    main()
