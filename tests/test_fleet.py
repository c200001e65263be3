"""Local devices where the native part was not built."""

from __future__ import annotations

import logging
import sys

import pytest

from app.engine import kernels
from app.engine.devices.numpy import NumpyDevice
from app.errors import ConfigError
from app.fleet import LocalOptions, open_local


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
