"""What splitting gains and costs: workers of one pinned thread each, beside the local device and llama.cpp's own split.

`python -m bench.split [--model FILE.gguf] [--only prompt,decode,...] [--trace out.json] [--save] [--name NAME]` runs
the real engine over real workers on loopback, everything in turns in one run, and puts each figure beside what is
promised. Stop everything else: the machine needs a core for each worker, and what the control plane does comes on top.

The yardstick of a prompt is a pipeline of n equal ubatches over S stages, which takes (n + S - 1) / (S n) of the time
of one worker. That of two decode groups is one worker with one of the groups: while it does a step of one, two workers
do a step of both. What two cores lose when both compute is measured as well, by two engines of one worker each at once,
and a prompt is put beside the bound by what its own slowest stage took.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from app import models_store
from app.engine.engine import Engine
from app.engine.placement import Tune
from app.engine.request import SamplingParams
from app.engine.trace import Trace
from bench.split_report import Report, new_report
from bench.split_setups import GGML, LOCAL, STOCK, TANDEM, Setup, llama_over, setup, stock_python
from tests.fakes.serving import collect, request, tokens_of

PROMPT_TOKENS, DECODE_TOKENS = 2048, 48
N_STREAMS, STREAM_TOKENS = 16, 32
N_REQUESTS, REQUEST_PROMPT, REQUEST_TOKENS = 8, 512, 64
MIX_PROMPT, MIX_TOKENS = 300, 12
LINK_S = 5e-3
MAX_WARM_ROUNDS = 6
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, n_logprobs=0)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    tag: str,
    sampling: SamplingParams = SAMPLING,
    *,
    cache_prompt: bool = False,
) -> tuple[float, list[list[int]]]:
    """Seconds until all are answered, and the answers."""

    async def scene() -> list[list[int]]:
        wanted = [
            request(f"{tag}-{i}", prompt, n_tokens, sampling=sampling, cache_prompt=cache_prompt)
            for i, prompt in enumerate(prompts)
        ]
        return [tokens_of(events) for events in await asyncio.gather(*(collect(engine, one) for one in wanted))]

    began = time.perf_counter()
    answers = asyncio.run(scene())
    return time.perf_counter() - began, answers


def prompts(n: int, length: int, seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(100, 5000, length)] for _ in range(n)]


#: Prompts and the tokens to draw after each.
TASKS = {
    "prompt": (prompts(1, PROMPT_TOKENS), 1),
    "decode": (prompts(1, 8), DECODE_TOKENS),
    "half of the streams": (prompts(N_STREAMS, 8)[: N_STREAMS // 2], STREAM_TOKENS),
    "streams": (prompts(N_STREAMS, 8), STREAM_TOKENS),
    "requests": (prompts(N_REQUESTS, REQUEST_PROMPT), REQUEST_TOKENS),
    "mix": ([*prompts(1, MIX_PROMPT), *prompts(3, 20)], MIX_TOKENS),
}


def do(made: Setup, task: str, tag: str) -> float:
    """One run of a task; what it drew must be what it drew before, but by kernels that round otherwise in company."""
    wanted, n_tokens = TASKS[task]
    before, stages_before = made.engine.counters()["ubatches_total"], made.stage_seconds()
    seconds, answers = run(made.engine, wanted, n_tokens, f"{task}-{tag}")
    if seconds <= min(made.seconds.get(task, [seconds])):
        made.n_ubatches[task] = made.engine.counters()["ubatches_total"] - before
        stages = zip(made.stage_seconds(), stages_before, strict=True)
        made.slowest_stage_s[task] = max(after - earlier for after, earlier in stages)
    drew_the_same = made.answers.setdefault(task, answers) == answers
    assert drew_the_same or not made.is_ours, f"{task} drew other tokens the second time"
    return seconds


def warm_up(made: Setup, task: str) -> None:
    """Until stage times are known and a round prepares no program; but not for ever."""
    for number in range(MAX_WARM_ROUNDS):
        before = made.engine.counters()["programs_prepared_total"]
        do(made, task, f"warm{number}")
        if made.engine.counters()["programs_prepared_total"] == before:
            return


def measure(setups: dict[str, Setup], task: str, rounds: int, report: Report) -> None:
    """Every setup in turn, `rounds` times after each has warmed up."""
    for made in setups.values():
        warm_up(made, task)
    for number in range(rounds):
        for made in setups.values():
            seconds = do(made, task, str(number))
            made.seconds.setdefault(task, []).append(seconds)
    for name, made in setups.items():
        report.time(task, name, made.best_s(task))
    first, *others = setups.values()
    if others:
        report.figure(f"{task}: same bytes", float(all(o.answers[task] == first.answers[task] for o in others)), 1.0)


def of_bound(one_s: float, two: Setup, task: str, more_s: float = 0.0) -> float:
    """What part of the bound over two stages was reached."""
    n = two.n_ubatches[task]
    return (one_s * (n + 1) / (2 * n) + more_s) / two.best_s(task)


def prompt(model: str, rounds: int, report: Report, setups: dict[str, Setup]) -> None:
    measure(setups, "prompt", rounds, report)
    local, one, two = (setups[name] for name in ("local", "one worker", "two workers"))
    one_s = one.best_s("prompt")
    report.figure("prompt: two workers over one", one_s / two.best_s("prompt"), 1.75)
    n = two.n_ubatches["prompt"]
    report.note(f"prompt over two workers in {n:.0f} ubatches, layers {two.layers}; bound {2 * n / (n + 1):.2f} of one")
    report.figure("prompt: two workers, of the bound", of_bound(one_s, two, "prompt"), 0.95)
    report.figure(
        "prompt: two workers, of the bound by what their stages took",
        two.slowest_stage_s["prompt"] * (n + 1) / n / two.best_s("prompt"),
    )
    report.figure("prompt: one worker over the local device", local.best_s("prompt") / one_s, 0.97)
    with setup(model, [TANDEM], first_core=1) as other:
        do(other, "prompt", "warm")
        with ThreadPoolExecutor(2) as both:
            pair_s = list(both.map(lambda made: do(made, "prompt", "pair"), (one, other)))
    report.time("prompt", "two engines of one worker each, at once", max(pair_s))
    slower = max(pair_s) / one_s
    report.figure("prompt: one worker alone over one beside another", 1 / slower)
    report.figure("prompt: two workers, of the bound with both cores busy", of_bound(one_s * slower, two, "prompt"))


def decode(model: str, rounds: int, report: Report, setups: dict[str, Setup]) -> None:
    measure(setups, "decode", rounds, report)
    one_s = setups["one worker"].best_s("decode")
    report.figure("decode: two workers over one", one_s / setups["two workers"].best_s("decode"), 0.95)
    report.figure("decode: one worker over the local device", setups["local"].best_s("decode") / one_s)


def streams(model: str, rounds: int, report: Report, setups: dict[str, Setup]) -> None:
    far = {name: setups[name] for name in ("one worker", "two workers")}
    measure(far, "half of the streams", rounds, report)
    measure(setups, "streams", rounds, report)
    one, two = far.values()
    half_s = one.best_s("half of the streams")
    report.figure(f"{N_STREAMS} streams: two workers over one", one.best_s("streams") / two.best_s("streams"))
    report.figure(f"{N_STREAMS} streams: of the bound of two groups", half_s / two.best_s("streams"), 0.92)
    with setup(model, [TANDEM, TANDEM], tune=Tune.DECODE) as tuned:
        report.note(f"with --tune decode the layers are {tuned.layers}")
        measure({"two workers, --tune decode": tuned}, "streams", rounds, report)
        reached = half_s / tuned.best_s("streams")
        report.figure(f"{N_STREAMS} streams, --tune decode: of the bound of two groups", reached, 0.92)


def requests(model: str, rounds: int, report: Report, setups: dict[str, Setup]) -> None:
    measure(setups, "requests", rounds, report)
    one_s, two_s = (setups[name].best_s("requests") for name in ("one worker", "two workers"))
    report.figure(f"{N_REQUESTS} x ({REQUEST_PROMPT} + {REQUEST_TOKENS}): two workers over one", one_s / two_s, 1.6)


def links(model: str, rounds: int, report: Report, setups: dict[str, Setup]) -> None:
    one = setups["one worker"]
    if "prompt" not in one.seconds:
        measure({"one worker": one}, "prompt", rounds, report)
    with setup(model, [TANDEM, TANDEM], link_s=LINK_S) as two:
        measure({f"two workers, links of {LINK_S * 1e3:g} ms": two}, "prompt", rounds, report)
        # two links, each there and back, once
        reached = of_bound(one.best_s("prompt"), two, "prompt", 4 * LINK_S)
        report.figure(f"prompt: links of {LINK_S * 1e3:g} ms, of the bound", reached, 0.9)
        report.figure("prompt with links: same bytes", float(two.answers["prompt"] == one.answers["prompt"]), 1.0)


def mixes(model: str, rounds: int, report: Report, setups: dict[str, Setup]) -> None:
    """Ours in any mixture draw the same; llama.cpp's workers, whose kernels are others, what one of them does."""
    do(setups["local"], "mix", "mix")
    want = setups["local"].answers["mix"]
    for kinds in ([TANDEM, STOCK], [STOCK, STOCK], [LOCAL, TANDEM], [STOCK, LOCAL]):
        with setup(model, kinds) as mixed:
            do(mixed, "mix", "mix")
            report.figure(f"{' + '.join(kinds)}: same bytes", float(mixed.answers["mix"] == want), 1.0)
    if stock_python() is None:
        report.note("no llama.cpp here (`make interop` fetches it): its workers were not measured")
        return
    with setup(model, [GGML]) as one:
        do(one, "mix", "mix")
        for kinds in ([GGML, GGML], [GGML, TANDEM]):
            with setup(model, kinds) as mixed:
                seconds = min(do(mixed, "mix", str(number)) for number in range(2))
                same = [a == b for a, b in zip(mixed.answers["mix"], one.answers["mix"], strict=True)]
                report.time("mix", " + ".join(kinds), seconds)
                report.figure(f"{' + '.join(kinds)}: answers as of one ggml worker", sum(same) / len(same))


def llama(model: str, rounds: int, report: Report, setups: dict[str, Setup]) -> None:
    """llama.cpp over its own workers, one and two."""
    python = stock_python()
    if python is None:
        report.note("no llama.cpp here (`make interop` fetches it): its own split was not measured")
        return
    best: dict[tuple[str, int], float] = {}
    with ExitStack() as stack:
        children = {n: stack.enter_context(llama_over(python, model, n)) for n in (1, 2)}
        for number in range(min(rounds, 1) + 1):  # these are slow
            for n, child in children.items():
                for task, n_tokens in (("prompt", PROMPT_TOKENS), ("decode", DECODE_TOKENS)):
                    child.ask("forget")
                    seconds = child.ask(task, n_tokens)
                    if number:
                        best[task, n] = min(seconds, best.get((task, n), seconds))
    for (task, n), seconds in best.items():
        report.time(task, f"llama.cpp, {n} of its workers", seconds)
    for task in ("prompt", "decode"):
        report.figure(f"{task}: llama.cpp, two workers over one", best[task, 1] / best[task, 2])
        two = setups["two workers"].seconds.get(task)
        if two:
            report.figure(f"{task}: two workers, llama.cpp's time over ours", best[task, 2] / min(two))


PARTS: dict[str, Callable[[str, int, Report, dict[str, Setup]], None]] = {
    "prompt": prompt, "decode": decode, "streams": streams, "requests": requests, "links": links, "mixes": mixes,
    "llama": llama,
}  # fmt: skip


def parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {', '.join(map(repr, unknown))}; there are {', '.join(PARTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", type=parts, default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--trace", type=Path, default=None, help="trace of the two workers")
    parser.add_argument("--save", action="store_true", help="write bench/results/NAME.*")
    parser.add_argument("--name", default="split", help="of the results; another one for another model")
    given = parser.parse_args()
    model = str(models_store.resolve(given.model))
    trace = None if given.trace is None else Trace(given.trace)
    report = new_report(model, sys.argv[1:])
    print(f"{report.machine}; {report.model}")
    with ExitStack() as stack:
        if trace is not None:
            stack.callback(trace.save)
        setups = {
            name: stack.enter_context(setup(model, kinds, trace=trace if len(kinds) == 2 else None))
            for name, kinds in (("local", [LOCAL]), ("one worker", [TANDEM]), ("two workers", [TANDEM, TANDEM]))
        }
        gc.collect()
        gc.freeze()  # as a server does once it stands
        for part in given.only:
            PARTS[part](model, given.rounds, report, setups)
            if given.save:
                report.save(given.name)


if __name__ == "__main__":
    main()
