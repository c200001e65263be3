"""Workers for tests: over TCP on any free port, or in memory over a pair of connected sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from app.engine.device import Device
from app.rpc.connect import connect
from app.rpc.device import RpcDevice
from app.rpc.endpoint import Timeouts
from app.rpc.worker import Worker, WorkerSettings

#: Deadlines of tests: long enough for a busy machine, short enough to fail.
QUICK = Timeouts(connect_s=10.0, hello_s=10.0, answer_s=30.0, idle_s=30.0)


@contextmanager
def tcp_worker(*devices: Device, settings: WorkerSettings | None = None) -> Iterator[Worker]:
    """A worker that listens; its devices are closed with it."""
    worker = Worker(devices, replace(settings or WorkerSettings(), port=0))
    worker.start()
    try:
        yield worker
    finally:
        worker.close()
        for device in devices:
            device.close()


@contextmanager
def connected(worker: Worker, timeouts: Timeouts = QUICK) -> Iterator[list[RpcDevice]]:
    """The devices of a listening worker."""
    devices = connect(f"127.0.0.1:{worker.port}", timeouts=timeouts)
    try:
        yield devices
    finally:
        for device in devices:
            device.close()


def memory_dial(worker: Worker) -> Callable[[], socket.socket]:
    """Connects to a worker that need not listen."""

    def dial() -> socket.socket:
        near, far = socket.socketpair()
        worker.serve(far, "memory")
        return near

    return dial


@contextmanager
def remote(device: Device, settings: WorkerSettings | None = None, *, memory: bool = False) -> Iterator[RpcDevice]:
    """One device behind a worker of its own; all three are closed in the end."""
    worker = Worker([device], replace(settings or WorkerSettings(), port=0))
    try:
        if memory:
            (far,) = connect("memory", timeouts=QUICK, dial=memory_dial(worker))
        else:
            worker.start()
            (far,) = connect(f"127.0.0.1:{worker.port}", timeouts=QUICK)
        try:
            yield far
        finally:
            far.close()
    finally:
        worker.close()
        device.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """For what happens in other threads and has no event to wait for."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")
