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
from app.rpc.connect import connect
from app.rpc.worker import WorkerSettings
from tests.interop.stock import stock_worker
from tests.rpc.workers import QUICK, remote

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


@contextmanager
def _rpc_cpu(memory_limit_bytes: int | None) -> Iterator[Device]:
    """A native device at the far end."""
    with _cpu(1)(memory_limit_bytes) as native, remote(native) as device:
        yield device


@contextmanager
def _stock(memory_limit_bytes: int | None) -> Iterator[Device]:
    """llama.cpp's own worker."""
    if memory_limit_bytes is not None:
        pytest.skip("a stock worker has no memory limit to set")
    with stock_worker() as endpoint:
        (device,) = connect(endpoint, timeouts=QUICK)
        try:
            yield device
        finally:
            device.close()


DEVICES: dict[str, Factory] = {
    "numpy": _numpy(1),
    "numpy-2-threads": _numpy(2),
    "cpu": _cpu(1),
    "cpu-2-threads": _cpu(2),
    "rpc-memory": _rpc(WorkerSettings(), memory=True),
    "rpc-tcp": _rpc(WorkerSettings(), memory=False),
    "rpc-cpu": _rpc_cpu,
    "rpc-as-stock-6.0": _rpc(WorkerSettings(version=(6, 0), extensions=False), memory=True),
    "rpc-stock": _stock,
}

#: Run only when asked for, by `make interop`.
INTEROP = ("rpc-stock",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.interop) if name in INTEROP else name for name in DEVICES],
)
def device_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in INTEROP and "interop" not in (request.config.option.markexpr or ""):
        pytest.skip("needs real peers; run `make interop`")
    if name == "rpc-stock" and request.module.__name__.endswith("test_ops"):
        pytest.skip("other kernels round otherwise, and a stock worker ends its process over what it cannot do")
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
