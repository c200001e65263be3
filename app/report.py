"""What a start tells the person who started it: progress, placement, and how to talk to the server."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from app.engine.device import Device
from app.engine.loader import PlannedStage, Uploaded
from app.engine.stage import StageLimits
from app.units import mib

#: Plain progress lines, where there is no terminal, come at most this often.
_PLAIN_EVERY_S = 5.0


def plan_table(planned: Sequence[PlannedStage], limits: StageLimits, n_layers: int, unmeasured: str = "") -> Table:
    """Where each layer range stands and what it takes: memory, and the seconds its device was measured to need.

    `unmeasured`: why no seconds are known.
    """
    has_state = any(stage.state_bytes for stage in planned)
    title = f"placement: {n_layers} layers, {limits.n_cells:,} KV cells"
    title += f", {limits.n_snapshots:,} snapshots" if has_state else ""
    caption = f"no stage times: {unmeasured}" if unmeasured else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("device", no_wrap=True)  # of names of workers on one host the end differs
    table.add_column("layers")
    for heading in ("weights", "KV cache", *(("state",) if has_state else ()), "compute", "all"):
        table.add_column(heading, justify="right", overflow="fold")
    is_timed = any(stage.seconds is not None for stage in planned)
    for heading in ("ms per prompt token", "per decoded token") if is_timed else ():
        table.add_column(heading, justify="right", overflow="fold")
    for stage in planned:
        states = (stage.state_bytes,) if has_state else ()
        parts = (stage.weight_bytes, stage.cache_bytes, *states, stage.compute_bytes, stage.total_bytes)
        times = () if stage.seconds is None else (stage.seconds.prompt_s, stage.seconds.decode_s)
        cells = (*map(mib, parts), *(f"{1e3 * seconds:.3f}" for seconds in times))
        table.add_row(stage.device.name, stage.shape.layers, *cells)
    return table


def device_table(devices: Sequence[Device]) -> Table:
    """What there is to place a model on."""
    table = Table(title="devices", title_justify="left")
    table.add_column("name", no_wrap=True)
    for heading in ("kind", "kernels", "memory free", "memory total", "round trip", "description"):
        table.add_column(
            heading, justify="right" if heading in ("memory free", "memory total", "round trip") else "left"
        )
    for device in devices:
        memory = device.memory()
        table.add_row(
            device.name,
            device.caps.kind,
            device.caps.kernel_variant,
            mib(memory.free_bytes),
            mib(memory.total_bytes),
            f"{_round_trip_s(device) * 1e6:,.0f} us",
            device.caps.description,
        )
    return table


def _round_trip_s(device: Device, n_trials: int = 20) -> float:
    """The shortest of some waits for an empty lane."""
    times_s = []
    for _ in range(n_trials):
        started_s = time.perf_counter()
        device.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def print_table(table: Table) -> None:
    """Print what stands in the cells as it is: names of devices hold what others say of themselves, in brackets."""
    is_terminal = Console(file=sys.stdout).is_terminal
    Console(file=sys.stdout, width=None if is_terminal else 120, markup=False, emoji=False).print(table)


def curl_line(url: str, needs_key: bool) -> str:
    """A command to paste: one streamed chat, greedy and with an instruction that even a very small model follows."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    messages = [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    body = json.dumps({"messages": messages, "temperature": 0, "stream": True}, separators=(",", ":"))
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


class UploadReport:
    """Adds up what all devices have taken of their weights and prints it; called from the devices' threads."""

    def __init__(self) -> None:
        self._devices: dict[str, Uploaded] = {}
        self._started_s = time.monotonic()
        self._printed_s = self._started_s
        self._is_terminal = sys.stderr.isatty()

    @property
    def fraction(self) -> float:
        total = sum(device.total_bytes for device in self._devices.values())
        return sum(device.done_bytes for device in self._devices.values()) / total if total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None before anything was sent."""
        fraction = self.fraction
        return (time.monotonic() - self._started_s) * (1 - fraction) / fraction if fraction else None

    def __call__(self, uploaded: Uploaded) -> None:
        self._devices[uploaded.device] = uploaded
        now = time.monotonic()
        is_over = all(device.done_bytes >= device.total_bytes for device in list(self._devices.values()))
        if is_over or now - self._printed_s >= (0.1 if self._is_terminal else _PLAIN_EVERY_S):
            self._printed_s = now
            self._print(now, is_over)

    def _print(self, now: float, is_over: bool) -> None:
        elapsed_s = max(now - self._started_s, 1e-3)
        parts = [_upload_line(uploaded, elapsed_s) for _, uploaded in sorted(self._devices.items())]
        line = "loading: " + ", ".join(parts)
        if self._is_terminal:
            print(f"\r\x1b[K{line}", end="\n" if is_over else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _upload_line(uploaded: Uploaded, elapsed_s: float) -> str:
    """How far one device is, how much of that it was sent, and how fast."""
    sent_bytes = uploaded.done_bytes if uploaded.sent_bytes is None else uploaded.sent_bytes
    there_bytes = uploaded.done_bytes - sent_bytes
    speed = f"{sent_bytes / elapsed_s / 1e6:,.0f} MB/s"
    if there_bytes:
        speed = f"{mib(there_bytes)} were there, {mib(sent_bytes)} sent, {speed}"
    return f"{uploaded.device} {mib(uploaded.done_bytes)} of {mib(uploaded.total_bytes)} ({speed})"
