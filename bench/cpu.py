"""The CPU device against llama.cpp: `python -m bench.cpu [CASE ...] [--threads 1,2] [--rounds 5] [--quick]`.

Both engines hold the same model with the same number of threads and take turns, round by round, so that whatever else
the machine does hits both alike; a ratio is of one round, and the table gives the median with the least and the
largest. Beside them stand what was achieved and what the machine can do: bytes of weights (and keys and values) per
second of decode against reads, products per second of a prompt against the integer units.

Results are merged into bench/results/cpu.json case by case, and the table and the plot are made of that file, so cases
can be measured one at a time. llama.cpp is llama-cpp-python built from source in a venv of its own: `make interop`
makes it, LLAMA_PYTHON names another. Random-weight models are made once, in the cache beside the real ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from bench import cpu_report
from bench.cpu_cases import CASES, DECODE_TOKENS, PROMPT_TOKENS, Case, Work, work_of
from bench.limits import measure
from bench.measured import Child

RESULTS = Path(__file__).parent / "results"
_LLAMA_PYTHON = Path.home() / ".cache" / "tandem" / "interop-venv" / "bin" / "python"


def children(case: Case, path: Path, n_threads: int, stack: ExitStack) -> dict[str, Child]:
    """Both engines, ready; they end with the stack."""
    llama_python = os.environ.get("LLAMA_PYTHON", str(_LLAMA_PYTHON))
    if not Path(llama_python).exists():
        raise SystemExit(f"no llama-cpp-python at {llama_python}: run `make interop`, or set LLAMA_PYTHON")
    arguments = [str(path), str(n_threads), str(case.n_ctx)]
    commands = {
        "tandem": [sys.executable, "-m", "bench.tandem_child", *arguments],
        "llama": [llama_python, str(Path(__file__).with_name("llama_child.py")), *arguments],
    }
    return {name: stack.enter_context(Child(command)) for name, command in commands.items()}


def measure_case(case: Case, path: Path, n_threads: int, rounds: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Seconds per token by engine and task, one for each round."""
    n_prompt, n_decode = (128, 16) if quick else (PROMPT_TOKENS, DECODE_TOKENS)
    tasks = {"decode": n_decode} if case.depth else {"prompt": n_prompt, "decode": n_decode}
    with ExitStack() as stack:
        engines = children(case, path, n_threads, stack)
        for name, engine in engines.items():
            print(f"  {name}: {engine.description}", flush=True)
            engine.ask("fill", case.depth)  # from here on nothing is made that is made only once
            for task in tasks:
                engine.ask(task, n_prompt if task == "prompt" else 2)
        found: dict[str, dict[str, list[float]]] = {name: {task: [] for task in tasks} for name in engines}
        for number in range(rounds):
            for task, n in tasks.items():
                for name in sorted(engines, reverse=bool(number % 2)):
                    if task == "prompt":
                        engines[name].ask("forget")
                    found[name][task].append(engines[name].ask(task, n) / n)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all without any")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two short rounds, of the smallest model if no case is named; writes nothing",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    threads = [int(n) for n in given.threads.split(",")]
    names = given.cases or (["smollm2"] if given.quick else list(CASES))
    limits = measure(threads)
    report = cpu_report.Report.load(given.results / "cpu.json") if not given.quick else cpu_report.Report.new()
    for n_threads, found in limits.items():
        report.limits[str(n_threads)] = asdict(found)
    for name in names:
        path = CASES[name].path()
        work: Work = work_of(path, CASES[name].depth)
        for n_threads in threads:
            print(f"{name}, {n_threads} threads", flush=True)
            seconds = measure_case(CASES[name], path, n_threads, 2 if given.quick else given.rounds, given.quick)
            report.cases[f"{name}/{n_threads}"] = cpu_report.entry(seconds, work, limits[n_threads])
            print(cpu_report.lines(report, [f"{name}/{n_threads}"]), flush=True)
            if not given.quick:
                report.save(given.results)
    if given.quick:
        print("nothing is written by --quick")


if __name__ == "__main__":
    main()
