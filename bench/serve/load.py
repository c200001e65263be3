"""Many streams over HTTP for minutes, while prompts of 2,000 tokens keep arriving at the same server.

Each stream asks for answers of 128 tokens, one after another; a long prompt is sent as soon as the one before has its
first token and a pause has passed. Before the clock starts the whole cache is written once, since memory that was
never touched is not resident yet. Time between tokens is between arrivals of pieces at the client, after a minute of
warming up (a tenth of short runs). Overhead is the share of time in which the device had nothing to compute although
streams wanted tokens: scheduling, sampling, HTTP, everything that is not hidden behind the device.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.serve.report import Figure

PROMPT_TOKENS, ANSWER_TOKENS, LONG_TOKENS = 24, 128, 2000
#: Cells per slot: a request's, and as many again of what finished ones left in the cache.
SLOT_CELLS = 320
#: Seconds between a long prompt's first token and the next long prompt.
PAUSE_S = 5.0


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    gaps_s: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_answers: int = 0
    n_long: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """What a server process holds."""

    rss_mib: float
    n_threads: int
    n_descriptors: int

    @classmethod
    def of(cls, pid: int) -> Resources:
        status = Path(f"/proc/{pid}/status").read_text()
        rss_kib, threads = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("VmRSS", "Threads"))
        return cls(rss_kib / 1024, threads, len(os.listdir(f"/proc/{pid}/fd")))


@contextmanager
def server(model: Path, n_streams: int, n_cells: int) -> Iterator[tuple[int, int]]:
    """A server of its own: process id and port."""
    flags = ["--port", "0", "-np", str(n_streams + 1), "-c", str(n_cells), "--metrics", "--device", "cpu"]
    command = [sys.executable, "-m", "app", "serve", "-m", str(model), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            port = _port(process)
            assert process.stdout is not None
            # Nobody reads its log; a full pipe would hold the server up.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield process.pid, port
        finally:
            process.terminate()
            process.wait(timeout=60)


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"http://[^:/ ]+:(\d+)", line)
        if found:
            return int(found[1])
    raise SystemExit(f"the server ended with {process.wait()} before it listened")


async def stream(port: int, body: dict[str, object], seen: Seen) -> None:
    """One streamed completion; notes the gaps between its pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps({"stream": True, "ignore_eos": True, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    last_s = 0.0
    async for line in reader:
        if line.startswith(b"HTTP/") and b" 200 " not in line:
            raise RuntimeError(f"the server answered {line!r}: {await reader.read()!r}")
        if not line.startswith(b'data: {"') or b'"finish_reason":null' not in line.replace(b" ", b""):
            continue
        now_s = time.monotonic()
        if last_s and seen.keep:
            seen.gaps_s.append(now_s - last_s)
        last_s = now_s
        seen.n_tokens += 1
    writer.close()


async def run(pid: int, port: int, n_streams: int, seconds: float, seen: Seen) -> list[Resources]:
    """The whole load; what the server held every now and then."""
    rng = np.random.default_rng(6)
    end_s = time.monotonic() + seconds
    loaded: list[Resources] = []

    async def short(number: int) -> None:
        await asyncio.sleep(number * 0.05)
        while time.monotonic() < end_s:
            prompt = rng.integers(100, 20_000, PROMPT_TOKENS).tolist()
            await stream(port, {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.8}, seen)
            seen.n_answers += 1

    async def long() -> None:
        while time.monotonic() < end_s:
            prompt = rng.integers(100, 20_000, LONG_TOKENS).tolist()
            await stream(port, {"prompt": prompt, "max_tokens": 4}, Seen())
            seen.n_long += 1
            await asyncio.sleep(PAUSE_S)

    async def watch() -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(min(15.0, seconds / 10))
            loaded.append(Resources.of(pid))
            print(
                f"  {end_s - time.monotonic():5.0f} s to go: {seen.n_tokens} tokens, {loaded[-1]}",
                file=sys.stderr,
                flush=True,
            )

    async def begin() -> None:
        await asyncio.sleep(min(60.0, seconds / 10))
        seen.keep = True

    await asyncio.gather(*(short(number) for number in range(n_streams)), long(), watch(), begin())
    return loaded


async def fill(port: int, n_cells: int) -> None:
    """Write every cell of the cache once."""
    rng = np.random.default_rng(7)
    for _ in range(-(-n_cells // LONG_TOKENS)):
        await stream(port, {"prompt": rng.integers(100, 20_000, LONG_TOKENS).tolist(), "max_tokens": 1}, Seen())


def metrics(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    return {name: float(value) for name, value in re.findall(r"^tandem_(\w+) ([-+.\deE]+)$", text, re.MULTILINE)}


def measure(model: Path, minutes: float, n_streams: int) -> list[Figure]:
    seen = Seen()
    n_cells = (n_streams + 1) * SLOT_CELLS + LONG_TOKENS
    with server(model, n_streams, n_cells) as (pid, port):
        asyncio.run(fill(port, n_cells))
        time.sleep(1.0)
        fresh = Resources.of(pid)
        before, began_s = metrics(port), time.monotonic()
        loaded = asyncio.run(run(pid, port, n_streams, minutes * 60, seen))
        wall_s, after = time.monotonic() - began_s, metrics(port)
        time.sleep(1.0)
        idle, held = Resources.of(pid), metrics(port)
    busy_s = sum(
        after[name] - before[name] for name in ("stage_0_compute_seconds_total", "stage_0_transfer_seconds_total")
    )
    median_s, p99_s = (float(np.percentile(seen.gaps_s, percent)) for percent in (50, 99))
    third = max(1, len(loaded) // 3)
    middle_mib, last_mib = (
        float(np.median([held.rss_mib for held in part])) for part in (loaded[third : 2 * third], loaded[-third:])
    )
    n_threads = [max(held.n_threads for held in part) for part in (loaded[third : 2 * third], loaded[-third:])]
    n_left = idle.n_descriptors - fresh.n_descriptors
    n_held = held["requests_running"] + held["requests_in_flight"]

    def at_most(name: str, value: float, unit: str, target: float) -> Figure:
        return Figure(name, value, unit, target, at_least=False)

    return [
        Figure("minutes", wall_s / 60, "min"),
        Figure("answers", seen.n_answers, f"of {ANSWER_TOKENS} tokens"),
        Figure("prompts of 2,000 tokens meanwhile", seen.n_long, ""),
        Figure("tokens per second", seen.n_tokens / wall_s, "tokens/s"),
        at_most("overhead: device without work", 100 * (1 - busy_s / wall_s), "%", 5),
        Figure("time between tokens: median", median_s * 1e3, "ms"),
        Figure("time between tokens: p99", p99_s * 1e3, "ms"),
        at_most("time between tokens: p99 over median", p99_s / median_s, "x", 3),
        at_most("memory: last third of the run over the middle third", last_mib - middle_mib, "MiB", 8),
        at_most("threads: last third over middle third", n_threads[1] - n_threads[0], "", 0),
        at_most("descriptors: left when idle over before", n_left, "", 0),
        at_most("requests held when idle", n_held, "", 0),
        at_most("blocks held when idle", held["blocks_held"], "", 0),
    ]
