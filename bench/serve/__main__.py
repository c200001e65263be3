"""The serving core against its targets: `python -m bench.serve SECTION`; results go to bench/results/serve.{json,md}.

Sections: `same` (same bytes), `same-real` (the same with a real model), `warm` (shared prefixes), `versus` (against
llama.cpp), `load` (many streams for minutes). Sections with timings want the machine for themselves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from app import models_store
from bench.serve import load, same_bytes, versus, warm
from bench.serve.report import Figure, save

SECTIONS = ("same", "same-real", "warm", "versus", "load")


def measure(section: str, model: Path, given: argparse.Namespace) -> tuple[str, str, list[Figure]]:
    """Title, notes, figures."""
    if section == "same":
        return (
            "Same bytes",
            f"Random weights, {given.requests} requests, {same_bytes.__doc__}",
            same_bytes.tiny(given.requests, given.longest),
        )
    if section == "same-real":
        return "Same bytes, a real model", f"{model.name}; {same_bytes.__doc__}", same_bytes.real(model)
    if section == "warm":
        return "Warm prefix", f"{model.name}; {warm.__doc__}", warm.measure(model, given.rounds)
    if section == "versus":
        return "Against llama.cpp", f"{model.name}; {versus.__doc__}", versus.measure(model, given.rounds)
    title = "Load" if given.minutes >= 10 else "Load, a short run"
    return title, f"{model.name}; {load.__doc__}", load.measure(model, given.minutes, given.streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--dry", action="store_true", help="only print")
    given = parser.parse_args()
    title, notes, figures = measure(given.section, models_store.resolve(given.model), given)
    if given.dry:
        for figure in figures:
            print(f"{figure.name}: {figure.value:.4g} {figure.unit} {figure.target_text} {figure.verdict}")
    else:
        save(title, " ".join(notes.split()), figures)


if __name__ == "__main__":
    main()
