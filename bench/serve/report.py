"""Figures beside their targets, in JSON and as a table. A section that is run again replaces its old figures."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import described

RESULTS = Path(__file__).parent.parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `target` is what it must be: at least that with `at_least`, else at most; None: for show."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = True

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        is_met = self.value >= self.target if self.at_least else self.value <= self.target
        return "ok" if is_met else "MISS"

    @property
    def target_text(self) -> str:
        return "" if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:g}"


def save(section: str, notes: str, figures: list[Figure], path: Path = RESULTS / "serve.json") -> None:
    """Print a section and put it into the results."""
    for figure in figures:
        print(f"{figure.name}: {figure.value:.4g} {figure.unit} {figure.target_text} {figure.verdict}", flush=True)
    path.parent.mkdir(exist_ok=True)
    sections: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    sections[section] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": described(),
        "command": " ".join(["python -m bench.serve", *sys.argv[1:]]),
        "notes": notes,
        "figures": [{**asdict(figure), "verdict": figure.verdict} for figure in figures],
    }
    path.write_text(json.dumps(sections, indent=1) + "\n")
    path.with_suffix(".md").write_text(_table(sections))


def _table(sections: dict[str, Any]) -> str:
    parts = ["# Serving\n"]
    for name, section in sections.items():
        parts.append(f"## {name}\n\n{section['notes']}\n")
        parts.append(f"`{section['command']}`, {section['date']}, {section['machine']}\n")
        parts.append("| figure | value | target | |\n| --- | --- | --- | --- |")
        for kept in section["figures"]:
            figure = Figure(*(kept[key] for key in ("name", "value", "unit", "target", "at_least")))
            parts.append(
                f"| {figure.name} | {figure.value:.4g} {figure.unit} | {figure.target_text} | {figure.verdict} |"
            )
        parts.append("")
    return "\n".join(parts)
