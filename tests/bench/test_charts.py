"""What benchmarks save: which earlier figures stay, and charts in which everything can be told apart and read."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.plot import Series, bar_chart
from bench.split_sim import KINDS, Figure, kept

_SVG = "{http://www.w3.org/2000/svg}"


def figure(worker: str, ratio: float = 1.0) -> Figure:
    return Figure("prompt", 2, 0.0, worker, 100.0, 6.5, 6.5 * ratio, ratio)


def test_figures_of_kinds_that_were_not_measured_stay() -> None:
    pushed, relayed, stock = (kind.name for kind in KINDS.values())
    found = [figure(pushed), figure(relayed), figure("of a kind that is no more"), figure(stock)]
    assert kept(found, [figure(relayed, 1.02)]) == [figure(pushed), figure(stock)]
    assert kept(found, [figure(kind.name) for kind in KINDS.values()]) == []


@pytest.mark.parametrize("n_labels", [1, 6, 20])
def test_every_series_has_a_colour_of_its_own_and_a_legend_within_the_picture(n_labels: int) -> None:
    names = [f"series {number} of a long name" for number in range(8)]
    labels = [f"label {place}" for place in range(n_labels)]
    chart = ElementTree.fromstring(bar_chart("title", labels, [Series(name, [1.0] * n_labels) for name in names]))
    legend = [at(text) for text in chart.iter(f"{_SVG}text") if text.text in names]
    bars = [rect for rect in chart.iter(f"{_SVG}rect") if rect.find(f"{_SVG}title") is not None]
    top_y = min(at(bar)[1] for bar in bars)
    assert len(set(legend)) == len(names)
    assert all(x + 6 * len(names[0]) < float(chart.get("width", "nan")) and y < top_y for x, y in legend)
    assert len({bar.get("fill") for bar in bars}) == len(names)


def at(element: ElementTree.Element) -> tuple[float, float]:
    return float(element.get("x", "nan")), float(element.get("y", "nan"))


def test_more_series_than_colours_are_refused() -> None:
    with pytest.raises(ValueError, match="9 series"):
        bar_chart("title", ["label"], [Series(str(number), [1.0]) for number in range(9)])
