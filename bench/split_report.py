"""What `bench.split` found, each figure beside its promise: printed, and as JSON, Markdown and a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench.machine import described
from bench.plot import Series, bar_chart

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio, and the least it is promised to be; None: told and not promised."""

    what: str
    value: float
    target: float | None = None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "ok" if self.value >= self.target else "MISS"

    def __str__(self) -> str:
        promised = "" if self.target is None else f" (promised {self.target:g})"
        return f"  {self.verdict:4} {self.what}: {self.value:.3f}{promised}"


@dataclass(slots=True)
class Report:
    """Everything one run has found."""

    machine: str
    command: str
    model: str
    when: str
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def time(self, task: str, where: str, seconds: float) -> None:
        self.seconds.setdefault(task, {})[where] = round(seconds, 4)
        print(f"       {task}, {where}: {seconds:.3f} s", flush=True)

    def figure(self, what: str, value: float, target: float | None = None) -> None:
        self.figures.append(Figure(what, round(value, 4), target))
        print(self.figures[-1], flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"       {text}", flush=True)

    def save(self, name: str) -> None:
        """Write `name`.json, .md and .svg beside the other results."""
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        (RESULTS / f"{name}.md").write_text(self.markdown())
        promised = [figure for figure in self.figures if figure.target is not None]
        chart = bar_chart(
            "Splits, as a part of what is promised (1.0 and more is kept)",
            [figure.what for figure in promised],
            [Series("measured / promised", [figure.value / (figure.target or 1.0) for figure in promised])],
            line=1.0,
        )
        (RESULTS / f"{name}.svg").write_text(chart)

    def markdown(self) -> str:
        lines = ["# Splitting over workers", "", f"`{self.command}` on {self.machine}; {self.model}; {self.when}.", ""]
        lines += ["| figure | measured | promised | |", "| --- | --- | --- | --- |"]
        for figure in self.figures:
            target = "" if figure.target is None else f"{figure.target:g}"
            lines.append(f"| {figure.what} | {figure.value:.3f} | {target} | {figure.verdict} |")
        wheres = list(dict.fromkeys(where for times in self.seconds.values() for where in times))
        lines += ["", "Seconds, the best of all rounds:", "", f"| task | {' | '.join(wheres)} |"]
        lines.append("| --- |" + " --- |" * len(wheres))
        for task, times in self.seconds.items():
            cells = (f"{times[where]:.3f}" if where in times else "" for where in wheres)
            lines.append(f"| {task} | {' | '.join(cells)} |")
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def new_report(model: str, arguments: Sequence[str]) -> Report:
    command = " ".join(["python -m bench.split", *(Path(given).name for given in arguments)])
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Report(described(), command, Path(model).name, when)
