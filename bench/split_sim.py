"""How well stages overlap on more devices than this machine has cores: stand-ins behind real workers and sockets.

`python -m bench.split_sim [--slot-ms 200] [--stages 2,3,4,8] [--links-ms 0,1,10] [--worker KIND] [--save]`
splits nothing real: every stage is a device that sleeps for one slot per ubatch, in a process of its own, behind a real
worker, a real connection and a link with a delay. What is measured is everything else: dispatchers, boundary futures,
sockets, sessions.

Workers push boundaries to each other, or leave them to the control plane (`relayed`), or are as stock ones. Prompt: 64
ubatches with boundaries of 4 MiB, against (64 + stages - 1) slots and every link once, or twice (there and back) where
boundaries go through the control plane. Decode: as many groups as stages, each its next step only when it has answered
the one before, boundaries of 32 KiB, against one round of all stages and links per step. Slots are those that the
stand-ins measured in the same run, so that a busy machine's late wake-ups count as computing. `--save` writes
`bench/results/split_sim.{json,svg}`; with one kind of `--worker`, what was found for the other kinds stays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Semaphore

from app.engine.device import Device, Handle
from app.engine.handover import RELAYED, HandOver, Parcel, Region, choose, when_all
from app.engine.pacing import least_in_flight
from app.engine.program import Buffer, Program
from app.rpc.connect import connect
from app.rpc.worker import Worker, WorkerSettings
from bench.delay_proxy import DelayProxy
from bench.plot import Series, bar_chart
from tests.rpc.adder import Adder

PROMPT_UBATCHES, PROMPT_BYTES = 64, 4 << 20
DECODE_STEPS, DECODE_BYTES = 8, 32 << 10
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside its bound; `ratio` is what is promised to be at most 1.05."""

    what: str
    n_stages: int
    link_ms: float
    worker: str
    slot_ms: float
    bound_s: float
    took_s: float
    ratio: float


def stand_in(pipe: Connection, slot_s: float, extensions: bool, delay_s: float) -> None:
    """A worker with one sleeping device; sends its port, then, for every message, the mean slot since the last one."""
    slots: list[float] = []

    def sleep() -> None:
        began = time.monotonic()
        time.sleep(slot_s)
        slots.append(time.monotonic() - began)

    device = Adder("sleeper")
    device.before_run = sleep
    worker = Worker([device], WorkerSettings(port=0, extensions=extensions))
    worker.start()
    pipe.send(DelayProxy(("127.0.0.1", worker.port), delay_s).port if delay_s else worker.port)
    while pipe.recv():
        pipe.send(sum(slots) / max(1, len(slots)))
        slots.clear()


@dataclass(frozen=True, slots=True)
class Kind:
    """What workers are like, and what a ubatch's way over them costs besides their slots."""

    name: str
    extensions: bool
    pushes: bool

    def n_links(self, n_stages: int) -> int:
        """Links that a ubatch crosses from the control plane over all stages and back."""
        return n_stages + 1 if self.pushes else 2 * n_stages


KINDS = {
    "pushed": Kind("tandem, pushed", extensions=True, pushes=True),
    "relayed": Kind("tandem, relayed", extensions=True, pushes=False),
    "stock": Kind("stock protocol", extensions=False, pushes=False),
}


@dataclass(slots=True)
class SimStage:
    """One stage: a device, its memory, the program that takes a slot, and the way to the next stage."""

    device: Device
    buffer: Buffer
    handle: Handle
    pipe: Connection
    way: HandOver = RELAYED

    def submit(self, x: Parcel | memoryview, n_bytes: int) -> Parcel:
        """What a stage of a model does: small inputs, the boundary, the run, the departure of the next boundary."""
        self.device.write(self.buffer, 2 * PROMPT_BYTES, bytes(256))
        if isinstance(x, Parcel):
            x.deliver(Region(self.device, self.buffer, 0, n_bytes))
        else:
            self.device.write(self.buffer, 0, x, size_bytes=n_bytes)
        self.device.run(self.handle)
        return self.way.send(Region(self.device, self.buffer, PROMPT_BYTES, n_bytes))

    def mean_slot_s(self) -> float:
        self.pipe.send(True)
        return float(self.pipe.recv())


@contextmanager
def stages(n: int, slot_s: float, link_s: float, kind: Kind) -> Iterator[list[SimStage]]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        made, pipes = [], []
        for _ in range(n):
            near, far = context.Pipe()
            child = context.Process(target=stand_in, args=(far, slot_s, kind.extensions, link_s), daemon=True)
            child.start()
            stack.callback(child.join)
            stack.callback(child.terminate)
            pipes.append(near)
        for pipe in pipes:
            (device,) = connect(f"127.0.0.1:{pipe.recv()}")
            stack.callback(device.close)
            buffer = device.alloc(2 * PROMPT_BYTES + 4096)
            made.append(SimStage(device, buffer, device.prepare(Program("slot", (), ())), pipe))
        if kind.pushes:
            for stage, following in zip(made, made[1:], strict=False):
                stage.way = choose(stage.device, following.device)
                if stage.way is RELAYED:
                    raise SystemExit(f"{stage.device.name} cannot push to {following.device.name}")
        chain(made, memoryview(bytes(PROMPT_BYTES))).result()  # everything is warm when the clock starts
        for stage in made:
            stage.mean_slot_s()
        yield made


def chain(made: Sequence[SimStage], x: memoryview) -> Future[memoryview]:
    """Queue one ubatch on all stages at once."""
    parcels = [made[0].submit(x, len(x))]
    for stage in made[1:]:
        parcels.append(stage.submit(parcels[-1], len(x)))
    return when_all(parcels[-1].left, [proof for parcel in parcels for proof in parcel.proofs])


def prompt(made: Sequence[SimStage], n_in_flight: int) -> float:
    """Seconds for 64 ubatches, so many in flight at once."""
    x = memoryview(bytearray(PROMPT_BYTES))
    room = Semaphore(n_in_flight)
    last: Future[memoryview] = Future()
    began = time.monotonic()
    for _ in range(PROMPT_UBATCHES):
        room.acquire()
        last = chain(made, x)
        last.add_done_callback(lambda _: room.release())
    last.result()
    return time.monotonic() - began


def decode(made: Sequence[SimStage], n_groups: int) -> float:
    """Seconds for 8 steps of every group."""
    x = memoryview(bytearray(DECODE_BYTES))
    began = time.monotonic()
    groups = [chain(made, x) for _ in range(n_groups)]
    for step in range(DECODE_STEPS):
        for i, group in enumerate(groups):
            group.result()
            if step + 1 < DECODE_STEPS:
                groups[i] = chain(made, x)
    return time.monotonic() - began


def measure(n_stages: int, slot_s: float, link_s: float, kind: Kind) -> list[Figure]:
    worker, links_s = kind.name, kind.n_links(n_stages) * link_s
    figures = []

    def note(what: str, took_s: float, mean_slot_s: float, bound_s: float) -> None:
        ratio = took_s / bound_s
        figures.append(
            Figure(what, n_stages, link_s * 1e3, worker, mean_slot_s * 1e3, round(bound_s, 4), round(took_s, 4), ratio)
        )
        print(
            f"  {'ok  ' if ratio <= 1.05 else 'MISS'} {what:>6}, {n_stages} stages, {link_s * 1e3:4.1f} ms links, "
            f"{worker}: {took_s:6.3f} s, bound {bound_s:6.3f} s: {ratio:.3f}",
            flush=True,
        )

    round_s = n_stages * slot_s + links_s
    with stages(n_stages, slot_s, link_s, kind) as made:
        n_in_flight = max(1 + -int(-round_s // slot_s), least_in_flight(n_stages))  # as the engine does
        took_s = prompt(made, n_in_flight)
        slot = max(stage.mean_slot_s() for stage in made)
        note("prompt", took_s, slot, (PROMPT_UBATCHES + n_stages - 1) * slot + links_s)
        took_s = decode(made, n_stages)
        slot = max(stage.mean_slot_s() for stage in made)
        round_s = n_stages * slot + links_s
        note("decode", took_s, slot, DECODE_STEPS * round_s + (n_stages - 1) * slot)
    return figures


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slot-ms", type=float, default=200.0)
    parser.add_argument("--stages", type=numbers, default=[2, 3, 4, 8])
    parser.add_argument("--links-ms", type=numbers, default=[0, 1, 10])
    parser.add_argument("--worker", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--save", action="store_true", help="write bench/results/split_sim.*")
    given = parser.parse_args()
    kinds = list(KINDS.values()) if given.worker == "all" else [KINDS[given.worker]]
    figures: list[Figure] = []
    for kind in kinds:
        for n_stages in given.stages:
            for link_ms in given.links_ms:
                figures += measure(int(n_stages), given.slot_ms / 1e3, link_ms / 1e3, kind)
        if given.save:
            save([*kept(saved(), figures), *figures])


def saved() -> list[Figure]:
    """What earlier runs have found."""
    file = RESULTS / "split_sim.json"
    return [Figure(**figure) for figure in json.loads(file.read_text())] if file.is_file() else []


def kept(found: Sequence[Figure], figures: Sequence[Figure]) -> list[Figure]:
    """What stays beside new figures: that of other kinds of workers, as far as there still are such."""
    kinds = {kind.name for kind in KINDS.values()} - {figure.worker for figure in figures}
    return [figure for figure in found if figure.worker in kinds]


def save(figures: Sequence[Figure]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "split_sim.json").write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    labels = sorted({(f.n_stages, f.link_ms) for f in figures})
    ratios = {(f.what, f.worker, f.n_stages, f.link_ms): f.ratio for f in figures}
    series = [
        Series(f"{what}, {worker}", [ratios.get((what, worker, *at), 0.0) for at in labels])
        for worker in sorted({f.worker for f in figures})
        for what in ("prompt", "decode")
    ]
    text = bar_chart(
        "Time over the bound of an ideal pipeline (1.0 is ideal, 1.05 promised)",
        [f"{n} stages, {link:g} ms" for n, link in labels],
        series,
        line=1.05,
    )
    (RESULTS / "split_sim.svg").write_text(text)


if __name__ == "__main__":
    main()
