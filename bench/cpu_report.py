"""The results of bench.cpu: a JSON file that cases are merged into, and the table and plot made of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.cpu_cases import CASES, DECODE_TOKENS, PROMPT_TOKENS, Work
from bench.limits import Limits
from bench.machine import machine
from bench.plot import Series, bar_chart

_HEAD = (
    "| model | threads | prompt, tokens/s | llama.cpp | ratio | target | GMAC/s | of the limit "
    "| decode, tokens/s | llama.cpp | ratio | target | GB/s | of the limit | target |\n" + "| --- " * 15 + "|\n"
)


@dataclass(slots=True)
class Report:
    machine: dict[str, Any] = field(default_factory=machine)
    limits: dict[str, dict[str, float]] = field(default_factory=dict)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def new(cls) -> Report:
        return cls()

    @classmethod
    def load(cls, path: Path) -> Report:
        """What was measured on this machine before; nothing if the file is another machine's."""
        if path.exists():
            known = json.loads(path.read_text())
            if known["machine"] == machine():
                return cls(**known)
        return cls()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ordered = [
            f"{name}/{n}" for name in CASES for n in sorted(map(int, self.limits)) if f"{name}/{n}" in self.cases
        ]
        self.cases = {key: self.cases[key] for key in ordered}
        (folder / "cpu.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        (folder / "cpu.md").write_text(self.markdown())
        (folder / "cpu.svg").write_text(self.plot())

    def markdown(self) -> str:
        limits = "\n".join(
            f"- {n} threads: {one['read_gb_s']:.1f} GB/s read, {one['copy_gb_s']:.1f} GB/s read and written by copies, "
            f"{one['gmac_s']:.0f} GMAC/s of the integer units"
            for n, one in sorted(self.limits.items())
        )
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        return (
            f"# The CPU device against llama.cpp\n\nMade by `python -m bench.cpu`. The machine: {facts}.\n\n"
            f"What it can do at best, measured in the last run (a case's shares are of the limits of its own run):\n\n"
            f"{limits}\n\nPrompts of {PROMPT_TOKENS} tokens, {DECODE_TOKENS} tokens decoded, rates are medians, ratios "
            "medians with least and largest of the rounds.\nDecode passes with the lesser of its two targets, the "
            "ratio and the share of the read limit.\n\n"
            f"{_HEAD}{lines(self, list(self.cases))}"
        )

    def plot(self) -> str:
        labels = [f"{CASES[key.split('/')[0]].label}, {key.split('/')[1]}" for key in self.cases]
        series = [
            Series(f"{task}, ratio to llama.cpp", [one.get(task, {}).get("ratio", 0.0) for one in self.cases.values()])
            for task in ("prompt", "decode")
        ]
        return bar_chart("The CPU device against llama.cpp, by model and threads", labels, series, line=1.0)


def entry(seconds: dict[str, dict[str, list[float]]], work: Work, limits: Limits) -> dict[str, Any]:
    """One case's figures from seconds per token."""
    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat()}
    for task, mine in seconds["tandem"].items():
        peer = seconds["llama"][task]
        ratios = [theirs / ours for theirs, ours in zip(peer, mine, strict=True)]
        per_token, unit, limit = (
            (work.prompt_macs, "gmac_s", limits.gmac_s)
            if task == "prompt"
            else (work.decode_bytes, "gb_s", limits.read_gb_s)
        )
        achieved = per_token / median(mine) / 1e9
        found[task] = {
            "tokens_s": 1 / median(mine),
            "llama_tokens_s": 1 / median(peer),
            "ratio": median(ratios),
            "ratio_least": min(ratios),
            "ratio_largest": max(ratios),
            unit: achieved,
            "share": achieved / limit if limit else None,
            "rounds": len(mine),
        }
    return found


def _task(task: str, one: dict[str, Any] | None, name: str, n_threads: int) -> str:
    target = CASES[name].target
    wanted = target.prompt_ratio if task == "prompt" else target.decode_ratio
    n_columns = 6 if task == "prompt" else 7
    if one is None or wanted is None:
        return " - |" * n_columns
    share = f"{one['share']:.0%}" if one["share"] is not None else "-"
    text = (
        f" {one['tokens_s']:.1f} | {one['llama_tokens_s']:.1f} "
        f"| {one['ratio']:.2f} ({one['ratio_least']:.2f} to {one['ratio_largest']:.2f})"
    )
    if task == "prompt":
        return f"{text} | {_mark(one['ratio'] >= wanted)} {wanted:g} | {one['gmac_s']:.0f} | {share} |"
    share_wanted = target.read_share.get(n_threads)
    passed = one["ratio"] >= wanted or (share_wanted is not None and one["share"] >= share_wanted)
    wish = f"{share_wanted:.0%}" if share_wanted is not None else "-"
    return f"{text} | {_mark(passed)} {wanted:g} | {one['gb_s']:.1f} | {share} | {wish} |"


def _mark(passed: bool) -> str:
    return "met" if passed else "missed"


def lines(report: Report, keys: list[str]) -> str:
    """Rows of the table."""
    out = ""
    for key in keys:
        name, n_threads = key.split("/")
        one = report.cases[key]
        out += f"| {CASES[name].label} | {n_threads} |"
        out += _task("prompt", one.get("prompt"), name, int(n_threads))
        out += _task("decode", one.get("decode"), name, int(n_threads)) + "\n"
    return out
