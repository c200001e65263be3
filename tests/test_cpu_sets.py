"""Sets of CPUs as flags name them."""

from __future__ import annotations

import pytest

from app.engine.devices.numpy import NumpyDevice
from app.errors import ConfigError
from app.fleet import LocalOptions, open_local
from app.options import cpu_mask, cpu_range
from app.settings import WorkerSettings


@pytest.mark.parametrize(("text", "cpus"), [("0-3", (0, 1, 2, 3)), ("2", (2,)), ("5-5", (5,)), ("-1", (0, 1))])
def test_ranges(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_range(text) == cpus


@pytest.mark.parametrize("text", ["", "a-b", "3-1", "1-", "0-99999", "-"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="range of CPUs"):
        cpu_range(text)


@pytest.mark.parametrize(("text", "cpus"), [("0xf", (0, 1, 2, 3)), ("5", (0, 2)), ("100", (8,))])
def test_masks(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_mask(text) == cpus


@pytest.mark.parametrize("text", ["", "0", "xyz", "-1", "f" * 2000])
def test_what_is_no_mask_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="CPU"):
        cpu_mask(text)


def test_the_flags_of_both_spellings_add_up() -> None:
    from app.bootstrap.local_options import local_options

    settings = WorkerSettings(cpu_range=(0, 1), cpu_mask=(1, 3), cpu_strict=True)
    assert local_options(settings) == LocalOptions(cpus=(0, 1, 3), pin=True)


def test_a_device_that_cannot_bind_refuses_instead_of_ignoring() -> None:
    with pytest.raises(ConfigError, match="numpy device binds no threads"):
        open_local(["NUMPY"], LocalOptions(pin=True))
    (device,) = open_local(["NUMPY"], LocalOptions())
    assert isinstance(device, NumpyDevice)
    device.close()
