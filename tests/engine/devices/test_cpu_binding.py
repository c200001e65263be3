"""Where the native device's threads may run."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from app.errors import ConfigError

cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no threads")


def _threads() -> dict[int, set[int]]:
    """This process's threads and the CPUs each may use."""
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


def test_threads_keep_to_the_cpus_named_and_nobody_else_is_bound() -> None:
    before = _threads()
    last = max(os.sched_getaffinity(0))
    with closing(cpu.CpuDevice("CPU", 3, cpus=[last])) as device:
        device.synchronize()
        after = _threads()
    assert [after[task] for task in after.keys() - before.keys()] == [{last}] * 3  # two of the team, and the lane
    assert {task: after[task] for task in before} == before


def test_a_thread_to_a_cpu() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with closing(cpu.CpuDevice("CPU", 1, pin=True)) as device:
        device.synchronize()
        bound = [cpus for cpus in _threads().values() if len(cpus) == 1]
    assert {usable[0]} in bound


def test_no_more_threads_than_cpus_unless_asked_for() -> None:
    last = max(os.sched_getaffinity(0))
    with closing(cpu.CpuDevice("CPU", cpus=[last])) as device:
        assert "1 thread" in device.caps.description


def test_a_cpu_that_is_not_there_is_refused() -> None:
    mine = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=f"CPU {max(mine) + 1} is not among those"):
        cpu.CpuDevice("CPU", cpus=[max(mine) + 1])
    assert os.sched_getaffinity(0) == mine
