"""Ways to spread a model's layers: over devices of this process, and over workers of ours and as stock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.rpc.worker import WorkerSettings
from tests.rpc.workers import remote

#: Opens devices that live as long as the stack it is given, except local ones: who uses them closes them.
Open = Callable[[ExitStack], list[Device]]


def local(n: int) -> Open:
    return lambda stack: [NumpyDevice(f"D{i}") for i in range(n)]


def workers(n: int, *, n_local: int = 0, version: tuple[int, int] = (7, 0), extensions: bool = True) -> Open:
    settings = WorkerSettings(version=version, extensions=extensions)

    def open_(stack: ExitStack) -> list[Device]:
        far = [stack.enter_context(remote(NumpyDevice("CPU"), settings)) for _ in range(n)]
        return [*(NumpyDevice(f"D{i}") for i in range(n_local)), *far]

    return open_


SPLITS: dict[str, Open] = {
    "two local": local(2),
    "three local": local(3),
    "one worker": workers(1),
    "two workers": workers(2),
    "three workers": workers(3),
    "local and worker": workers(1, n_local=1),
    "two workers as stock 7.0": workers(2, extensions=False),
    "two workers as stock 6.0": workers(2, version=(6, 0), extensions=False),
}
