"""The devices that the contract's suite runs over. A new kind of device joins by one line in `DEVICES`.

A factory is a context manager: it yields a ready device with about `memory_limit_bytes` of memory (None: no limit) and
takes down whatever it needed. `device` is shared by a module's tests and must be left usable; `make_device` gives a
test devices of its own to break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.rpc.worker import WorkerSettings
from tests.rpc.workers import remote

Factory = Callable[[int | None], AbstractContextManager[Device]]
MakeDevice = Callable[..., Device]


def _numpy(n_threads: int) -> Factory:
    @contextmanager
    def factory(memory_limit_bytes: int | None) -> Iterator[Device]:
        device = NumpyDevice("CPU", n_threads, memory_limit_bytes)
        try:
            yield device
        finally:
            device.close()

    return factory


def _cpu(n_threads: int) -> Factory:
    @contextmanager
    def factory(memory_limit_bytes: int | None) -> Iterator[Device]:
        cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")
        device = cpu.CpuDevice("CPU", n_threads, memory_limit_bytes)
        try:
            yield device
        finally:
            device.close()

    return factory


def _rpc(settings: WorkerSettings, *, memory: bool) -> Factory:
    """A numpy device at the far end of the wire, behind a worker of its own."""

    @contextmanager
    def factory(memory_limit_bytes: int | None) -> Iterator[Device]:
        with remote(NumpyDevice("CPU", 1, memory_limit_bytes), settings, memory=memory) as device:
            yield device

    return factory


DEVICES: dict[str, Factory] = {
    "numpy": _numpy(1),
    "numpy-2-threads": _numpy(2),
    "cpu": _cpu(1),
    "cpu-2-threads": _cpu(2),
    "rpc-memory": _rpc(WorkerSettings(), memory=True),
    "rpc-tcp": _rpc(WorkerSettings(), memory=False),
    "rpc-as-stock-6.0": _rpc(WorkerSettings(version=(6, 0), extensions=False), memory=True),
}


@pytest.fixture(scope="module", params=list(DEVICES))
def device_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def device(device_name: str) -> Iterator[Device]:
    with DEVICES[device_name](None) as made:
        yield made


@pytest.fixture
def make_device(device_name: str) -> Iterator[MakeDevice]:
    with ExitStack() as stack:

        def make(memory_limit_bytes: int | None = None) -> Device:
            return stack.enter_context(DEVICES[device_name](memory_limit_bytes))

        yield make
