"""What the wire costs, against bare sockets and against the same device without a wire, in one run on one machine.

`python -m bench.rpc [--model FILE.gguf] [--device CPU|NUMPY] [--save FILE.json]` prints figures and what is promised:
bulk transfers at 0.8 or more of a bare socket loop, a small round trip at most 4 of a bare echo, a worker at 0.97 or
more of the same device used locally. Everything runs in processes of its own, interleaved, so that a busy machine hits
all alike. Of transfers the best of several rounds counts; of tokens the ratio of medians, and the best is told as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np

from app import fleet, models_store
from app.engine.device import Device
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.program import Program
from app.engine.rows import RowWish
from app.rpc.connect import connect
from app.rpc.device import RpcDevice
from app.rpc.messages import Ping
from app.rpc.worker import Worker, WorkerSettings
from bench.machine import described
from tests.fakes.stack import Stack

#: What was measured, by name.
figures: dict[str, dict[str, object]] = {}

BULK_BYTES = 64 << 20
ROUNDS = 9
SMALL_CALLS = 400
PROMPT_TOKENS, DECODE_TOKENS = 128, 96
TOKEN_ROUNDS, BLOCK_TOKENS = 15, 12
#: What a request with the usual `top_k` needs.
WISH = RowWish(40, weighs=False)

#: What a bare peer is asked for, by the first byte of 13.
ECHO, TAKE, GIVE = 0, 1, 2


def bare_peer(ports: Queue[int]) -> None:
    """The least a socket loop in Python can do: echo, take a block, give a block."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports.put(listener.getsockname()[1])
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(BULK_BYTES))
    while wish := sock.recv(13):
        if wish[0] == ECHO:
            sock.sendall(wish)
        elif wish[0] == GIVE:
            sock.sendall(memory)
        else:
            _receive_all(sock, memory)
            sock.sendall(b"x")


def worker_process(ports: Queue[int], device: str, extensions: bool) -> None:
    """A worker with one thread."""
    worker = Worker(
        fleet.open_local((device,), fleet.LocalOptions(threads=1)), WorkerSettings(port=0, extensions=extensions)
    )
    worker.start()
    ports.put(worker.port)
    worker.wait()


def _receive_all(sock: socket.socket, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        at += sock.recv_into(memory[at:])


@contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[int]:
    """Another process that listens; its port."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    child = context.Process(target=target, args=(ports, *args), daemon=True)
    child.start()
    try:
        yield ports.get(timeout=60)
    finally:
        child.terminate()
        child.join()


@contextmanager
def remote_device(device: str, *, extensions: bool = True) -> Iterator[RpcDevice]:
    with process(worker_process, device, extensions) as port:
        (far,) = connect(f"127.0.0.1:{port}")
        try:
            yield far
        finally:
            far.close()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(ways: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Best seconds of each way, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            times[name].append(seconds(work))
    return {name: min(values) for name, values in times.items()}


def note(what: str, value: float, unit: str, form: str = ".1f") -> None:
    """One figure for the screen and for the file."""
    figures[what] = {"value": round(value, 4), "unit": unit}
    print(f"{what:>24}  {value:{form}} {unit}")


def promise(what: str, ratio: float, limit: float, *, at_least: bool) -> None:
    kept = ratio >= limit if at_least else ratio <= limit
    sign = ">=" if at_least else "<="
    figures[what] = {"value": round(ratio, 3), "promised": f"{sign} {limit:g}", "kept": kept}
    print(f"  {'ok  ' if kept else 'MISS'} {what}: {ratio:.2f} (promised {sign} {limit:g})")


def transfers(device: str) -> None:
    """Bulk and small transfers beside a bare socket."""
    data = np.random.default_rng(0).integers(0, 256, BULK_BYTES, np.uint8)
    into = np.zeros(BULK_BYTES, np.uint8)
    with process(bare_peer) as port, remote_device(device) as far:
        bare = socket.create_connection(("127.0.0.1", port))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = far.alloc(BULK_BYTES)

        def bare_set() -> None:
            bare.sendall(bytes([TAKE]) * 13)
            bare.sendall(data)
            bare.recv(1)

        def bare_get() -> None:
            bare.sendall(bytes([GIVE]) * 13)
            _receive_all(bare, into.data)

        def bare_echo() -> None:
            for _ in range(SMALL_CALLS):
                bare.sendall(bytes([ECHO]) * 13)
                bare.recv(13)

        def far_set() -> None:
            far.write(buffer, 0, data)
            far.synchronize()

        def far_get() -> None:
            far.read(buffer, 0, BULK_BYTES, into.data).result()

        def far_ping() -> None:
            for _ in range(SMALL_CALLS):
                far.link.dispatcher.ask(Ping(1)).result()

        def far_event() -> None:
            for _ in range(SMALL_CALLS):
                far.record().result()

        bulk = compare({"bare set": bare_set, "set": far_set, "bare get": bare_get, "get": far_get})
        for name, best in bulk.items():
            note(name, BULK_BYTES / best / 1e9, "GB/s", ".2f")
        small = compare({"bare echo": bare_echo, "ping": far_ping, "event": far_event}, rounds=3 * ROUNDS)
        for name, best in small.items():
            note(name, best / SMALL_CALLS * 1e6, "us")
        bare.close()
        promise("SET of 64 MiB against a bare socket", bulk["bare set"] / bulk["set"], 0.8, at_least=True)
        promise("GET of 64 MiB against a bare socket", bulk["bare get"] / bulk["get"], 0.8, at_least=True)
        promise("round trip against a bare echo", small["ping"] / small["bare echo"], 4, at_least=False)


def empty_steps(device: str) -> None:
    """What a decode step costs besides computing: a boundary activation, two small inputs, an empty program, a read."""
    with remote_device(device) as tandem, remote_device(device, extensions=False) as stock:
        near = fleet.open_local((device,), fleet.LocalOptions(threads=1))[0]
        ways = {"local": _stepper(near), "tandem": _stepper(tandem), "as stock": _stepper(stock)}
        best = compare({name: lambda step=step: [step() for _ in range(100)] for name, step in ways.items()})
        for name, value in best.items():
            note(f"empty step, {name}", value * 1e4, "us")
        near.close()


def _stepper(device: Device) -> Callable[[], object]:
    buffer = device.alloc(1 << 16)
    handle = device.prepare(Program("empty", (), ()))
    activation, small = np.zeros(2304, np.uint8), np.zeros(8, np.uint8)

    def step() -> object:
        device.write(buffer, 0, activation)
        device.write(buffer, 4096, small)
        device.write(buffer, 4160, small)
        device.run(handle)
        return device.read(buffer, 8192, 2304).result()

    return step


def tokens(model: str, device: str) -> None:
    """Prompt and decode speed of a model on a device here and behind a worker, in turns."""
    gguf = GGUFFile.open(model)
    with remote_device(device) as far:
        near = fleet.open_local((device,), fleet.LocalOptions(threads=1))[0]
        stacks = {name: Stack(gguf, [where], cache_type=GGMLType.F16) for name, where in (("here", near), ("far", far))}
        prompts: dict[str, list[float]] = {name: [] for name in stacks}
        decodes: dict[str, list[float]] = {name: [] for name in stacks}
        prompt = [int(t) for t in np.random.default_rng(1).integers(0, 1000, PROMPT_TOKENS)]
        for turn in range(TOKEN_ROUNDS + 1):
            for name, stack in stacks.items():
                stack.restart()
                took_s = seconds(lambda stack=stack: stack.feed(prompt))
                if turn:  # programs are prepared in the first one
                    prompts[name].append(PROMPT_TOKENS / took_s)
            for _ in range(DECODE_TOKENS // BLOCK_TOKENS):
                for name, stack in stacks.items():
                    _step(stack)  # the caches are the other one's
                    steps = [1 / seconds(lambda stack=stack: _step(stack)) for _ in range(BLOCK_TOKENS - 1)]
                    decodes[name] += steps if turn else []
        for what, speeds in (("prompt", prompts), ("decode", decodes)):
            for name, values in speeds.items():
                note(f"{what}, {name}, median", statistics.median(values), "tokens/s")
            best = max(speeds["far"]) / max(speeds["here"])
            note(f"{what}, best to best", best, "", ".3f")
            middle = statistics.median(speeds["far"]) / statistics.median(speeds["here"])
            promise(f"worker against local device, {what}", middle, 0.97, at_least=True)
        for stack in stacks.values():
            stack.close()


def _step(stack: Stack) -> None:
    """One token, with what a sampler needs of its logits."""
    stack.executor.submit(stack.ubatch([7], [0]), [WISH]).rows()


def events(device: str) -> None:
    """100,000 events made, some waited for, all dropped."""
    with remote_device(device) as far:
        for _ in range(1000):
            far.record()
        far.synchronize()
        before = _footprint()
        took_s = seconds(lambda: _make_events(far, 100_000))
        far.synchronize()
        rss, threads, files = (after - past for after, past in zip(_footprint(), before, strict=True))
        print(f"  100,000 events in {took_s:.1f} s: {rss >> 10:+d} KiB, {threads:+d} threads, {files:+d} descriptors")


def _make_events(device: Device, n: int) -> None:
    for i in range(n):
        event = device.record()
        if i % 100 == 0:
            event.result()


def _footprint() -> tuple[int, int, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(models_store.cached(models_store.DEFAULT_MODEL) or ""))
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--save", type=Path, help="where to put the figures, as JSON")
    wish = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    transfers(wish.device)
    empty_steps(wish.device)
    events(wish.device)
    if wish.model:
        print(f"{wish.model} on one thread of {wish.device}")
        tokens(wish.model, wish.device)
    if wish.save is not None:
        told = {"machine": described(), "model": Path(wish.model).name, "device": wish.device, "figures": figures}
        wish.save.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
