"""Local devices where the native part was not built, and workers by more than one name."""

from __future__ import annotations

import logging
import sys

import pytest

from app.engine import kernels
from app.engine.devices.numpy import NumpyDevice
from app.errors import ConfigError
from app.fleet import LocalOptions, close_all, open_devices, open_local
from app.rpc.worker import WorkerSettings
from tests.rpc.adder import Adder
from tests.rpc.workers import tcp_worker


@pytest.fixture
def _without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a wheel of Python alone."""
    monkeypatch.delitem(sys.modules, "app.engine.devices.cpu", raising=False)
    monkeypatch.delattr(kernels, "_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "app.engine.kernels._cpu", None)


@pytest.mark.usefixtures("_without_native_code")
def test_without_native_code_the_cpu_runs_on_numpy_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (device,) = open_local()
    try:
        assert isinstance(device, NumpyDevice)
        assert device.name == "CPU"
        assert "many times slower" in caplog.text
    finally:
        device.close()


@pytest.mark.usefixtures("_without_native_code")
def test_without_native_code_no_variant_can_be_chosen() -> None:
    with pytest.raises(ConfigError, match="none is called 'base'; leave out --cpu-variant"):
        open_local(["CPU"], LocalOptions(cpu_variant="base"))


def test_a_worker_under_two_names_is_refused_with_both() -> None:
    with tcp_worker(Adder()) as worker:
        names = (f"127.0.0.1:{worker.port}", f"localhost:{worker.port}")
        with pytest.raises(ConfigError, match=f"{names[0]} and {names[1]} are one and the same worker"):
            open_devices((), names)


def test_devices_of_one_worker_and_of_two_are_no_doubles() -> None:
    with tcp_worker(Adder("a"), Adder("b")) as one, tcp_worker(Adder("c")) as two:
        opened = open_devices((), (f"127.0.0.1:{one.port}", f"localhost:{two.port}"))
        assert len(opened) == 3
        close_all(opened)


def test_stock_workers_tell_nothing_of_themselves() -> None:
    stock = WorkerSettings(extensions=False)
    with tcp_worker(Adder(), settings=stock) as one, tcp_worker(Adder(), settings=stock) as two:
        opened = open_devices((), (f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"))
        assert len(opened) == 2
        close_all(opened)


def test_a_worker_that_is_not_used_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with tcp_worker(Adder()) as worker, caplog.at_level(logging.WARNING):
        endpoint = f"127.0.0.1:{worker.port}"
        for names, is_told in ((("RPC0",), False), (("NUMPY",), True)):
            caplog.clear()
            close_all(open_devices(names, (endpoint,)))
            assert (f"worker {endpoint} is not used: --device {names[0]}" in caplog.text) == is_told
