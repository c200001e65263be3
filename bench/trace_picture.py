"""Draws a trace of `--trace` as a plain SVG: a row per stage, computing and transfers as boxes, one colour per ubatch.

`python -m bench.trace_picture trace.json picture.svg [--from-ms A --to-ms B]`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, TOP = 960, 150, 46, 50


def draw(events: Sequence[Mapping[str, Any]], from_us: float, to_us: float, title: str) -> str:
    """The part of a trace between two times."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    boxes = [e for e in events if e["ph"] == "X" and e["ts"] < to_us and e["ts"] + e["dur"] > from_us]
    scale = (WIDTH - LEFT - 20) / max(1.0, to_us - from_us)
    first = min((e["args"]["ubatch"] for e in boxes), default=0)
    height = TOP + ROW * len(names) + 40
    parts = [f'<text x="{LEFT}" y="24" font-size="14">{escape(title)}</text>']
    for tid, name in sorted(names.items()):
        y = TOP + ROW * tid
        parts.append(f'<text x="8" y="{y + 24}">{escape(name)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{ROW - 8}" fill="#eee"/>')
    for event in boxes:
        start, end = max(from_us, event["ts"]), min(to_us, event["ts"] + event["dur"])
        x, width, y = LEFT + (start - from_us) * scale, (end - start) * scale, TOP + ROW * event["tid"]
        number = event["args"]["ubatch"] - first
        colour = "#999" if event["cat"] == "transfer" else f"hsl({number * 47 % 360} 55% 62%)"
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
        x = LEFT + (at_us - from_us) * scale
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{(at_us - from_us) / 1e3:.0f} ms</text>')
    style = "<style>text{font:11px sans-serif;fill:#444}</style><rect width='100%' height='100%' fill='#fff'/>"
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{style}{"".join(parts)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from-ms", type=float, default=None)
    parser.add_argument("--to-ms", type=float, default=None)
    parser.add_argument("--request", default=None, help="only as long as this request's ubatches ran")
    parser.add_argument("--title", default="Stages over time; gray: a boundary on its way")
    given = parser.parse_args()
    events = json.loads(given.trace.read_text())["traceEvents"]
    if given.request is not None:
        own = {e["id"] for e in events if e["ph"] == "b" and given.request in e["args"]["requests"]}
        events = [e for e in events if e["ph"] == "M" or e.get("args", {}).get("ubatch") in own]
    times = [at for e in events if e["ph"] == "X" for at in (e["ts"], e["ts"] + e["dur"])]
    from_us = min(times, default=0.0) if given.from_ms is None else given.from_ms * 1e3
    to_us = max(times, default=1.0) if given.to_ms is None else given.to_ms * 1e3
    given.picture.write_text(draw(events, from_us, to_us, given.title))


if __name__ == "__main__":
    main()
