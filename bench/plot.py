"""Plain SVG charts, written by hand so that benchmarks need no plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Pairs of neighbours are a dark and a light tone.
_COLOURS = ("#2f5f9e", "#8fb8e8", "#c96f1c", "#f2b880", "#3f7f54", "#9fd0ab", "#96407a", "#dda0c8")
_BAR, _GAP, _LEFT, _TOP, _HEIGHT = 10, 14, 50, 60, 260
_LEGEND_WIDTH, _LEGEND_LINE = 170, 16
_LEAST_WIDTH = 720


@dataclass(frozen=True, slots=True)
class Series:
    """One bar per label."""

    name: str
    values: Sequence[float]


def bar_chart(title: str, labels: Sequence[str], series: Sequence[Series], *, line: float | None = None) -> str:
    """Groups of bars from zero, one group per label; `line` is drawn across, for a promise."""
    if len(series) > len(_COLOURS):
        raise ValueError(f"{len(series)} series, but only {len(_COLOURS)} colours")
    top = max([*(value for one in series for value in one.values), line or 0.0]) * 1.1
    group = len(series) * _BAR + _GAP
    right = _LEFT + len(labels) * group + 20
    width = max(right + 60, _LEAST_WIDTH)
    per_line = (width - _LEFT) // _LEGEND_WIDTH
    bottom = _TOP + (len(series) - 1) // per_line * _LEGEND_LINE + _HEIGHT

    def y(value: float) -> float:
        return bottom - value / top * _HEIGHT

    parts = [f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>']
    for number, one in enumerate(series):
        colour = _COLOURS[number]
        x, legend_y = _LEFT + number % per_line * _LEGEND_WIDTH, 32 + number // per_line * _LEGEND_LINE
        parts.append(f'<rect x="{x}" y="{legend_y}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{legend_y + 9}">{escape(one.name)}</text>')
        for place, value in enumerate(one.values):
            x = _LEFT + place * group + number * _BAR
            height = value / top * _HEIGHT
            parts.append(
                f'<rect x="{x}" y="{y(value):.1f}" width="{_BAR - 1}" height="{height:.1f}" fill="{colour}">'
                f"<title>{escape(one.name)}, {escape(labels[place])}: {value:.3f}</title></rect>"
            )
    for tick in (0.0, 0.5, 1.0):
        if tick < top:
            parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
            parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{right}" stroke="#8886"/>')
    if line is not None:
        parts.append(f'<path d="M{_LEFT} {y(line):.1f}H{right}" stroke="#c33" stroke-dasharray="4 3"/>')
    for place, label in enumerate(labels):
        x = _LEFT + place * group + group // 2 - _GAP // 2
        parts.append(f'<text transform="translate({x} {bottom + 12}) rotate(35)">{escape(label)}</text>')
    style = "<style>text{font:11px sans-serif;fill:#555}</style><rect width='100%' height='100%' fill='#fff'/>"
    size = f'width="{width}" height="{bottom + 100}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(parts)}</svg>\n'
