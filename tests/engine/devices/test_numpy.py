"""What the reference device adds to the contract: aligned memory that really goes away, threads that change nothing."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from app.engine.device import DeviceMemory
from app.engine.devices import host_memory
from app.engine.devices.numpy import ALIGNMENT_BYTES, NumpyBuffer, NumpyDevice, NumpyHandle
from app.engine.ggml import GGMLType, Op
from app.errors import InternalError
from tests.contract.cases import F16, F32, I32, CaseBuilder, place, read_all


@pytest.fixture
def device():  # type: ignore[no-untyped-def]
    made = NumpyDevice("CPU")
    yield made
    made.close()


def test_it_calls_itself_what_it_is(device: NumpyDevice) -> None:
    assert (device.caps.kind, device.caps.kernel_variant) == ("numpy", "numpy")


@pytest.mark.parametrize("size", [1, 63, 64, 65, 100_000])
def test_buffers_are_aligned(device: NumpyDevice, size: int) -> None:
    buffer = device.alloc(size)
    assert buffer.memory is not None
    assert buffer.address % ALIGNMENT_BYTES == 0
    assert size == 0 or buffer.memory.ctypes.data == buffer.address
    assert buffer.memory.nbytes == size


def test_freed_memory_is_given_back_although_programs_are_still_held(device: NumpyDevice) -> None:
    case = CaseBuilder("held")
    case.node(Op.SCALE, F32, (4,), (case.random(F32, 4),), (2.0, 0.0))
    placed = place(case, device)
    handle = device.prepare(placed.program)
    memory = weakref.ref(cast(NumpyBuffer, placed.buffer).memory)
    device.free(placed.buffer)
    device.synchronize()
    gc.collect()
    assert memory() is None
    assert handle.steps == []


def test_a_dropped_handle_leaves_nothing_behind(device: NumpyDevice) -> None:
    case = CaseBuilder("dropped")
    case.node(Op.SCALE, F32, (4,), (case.random(F32, 4),), (2.0, 0.0))
    placed = place(case, device)
    handle = weakref.ref(device.prepare(placed.program))
    gc.collect()
    assert handle() is None
    assert not cast(NumpyBuffer, placed.buffer).handles


def small_model(name: str) -> CaseBuilder:
    """Products of all sizes, experts and attention: everything that is shared out among threads."""
    case = CaseBuilder(name)
    x = case.random(F32, 256, 5)
    for type_ in (F32, F16, GGMLType.Q4_1, GGMLType.Q6_K):
        weight = case.random(type_, 256, 3000)
        case.node(Op.MUL_MAT, F32, (3000, 5), (weight, x))
        case.node(Op.MUL_MAT, F32, (3000, 1), (weight, case.random(F32, 256, 1)))
    experts, ids = case.random(GGMLType.Q8_0, 256, 700, 4), case.leaf(I32, np.array([[0, 3], [2, 1], [3, 0]]))
    case.node(Op.MUL_MAT_ID, F32, (700, 2, 3), (experts, case.random(F32, 256, 1, 3), ids))
    q, k, v = case.random(F32, 64, 300, 6), case.random(F16, 64, 600, 2), case.random(F16, 64, 600, 2)
    mask = case.leaf(F16, np.where(np.arange(600) <= np.arange(300)[:, None] + 250, 0.0, -np.inf))
    case.node(Op.FLASH_ATTN_EXT, F32, (64, 6, 300), (q, k, v, mask), (0.125, 0.0, 0.0, 10))
    return case


def test_the_number_of_threads_changes_no_bit() -> None:
    images = []
    for n_threads in (1, 2, 5):
        device = NumpyDevice("CPU", n_threads)
        placed = place(small_model("threads"), device)
        device.run(device.prepare(placed.program))
        images.append(read_all(device, placed.buffer).copy())
        device.close()
    np.testing.assert_array_equal(images[0], images[1])
    np.testing.assert_array_equal(images[0], images[2])


def test_runs_keep_no_unpacked_weights(device: NumpyDevice) -> None:
    """Scratch is bounded: what a run leaves, and what it takes at its peak, is small against the weights."""
    case = CaseBuilder("one copy")
    x = case.random(F32, 2048, 1)
    weights = [case.random(GGMLType.Q4_0, 2048, 2048) for _ in range(4)]
    for weight in weights:
        case.node(Op.MUL_MAT, F32, (2048, 1), (weight, x))
        case.node(Op.MUL_MAT, F32, (2048, 3), (weight, case.random(F32, 2048, 3)))
    placed = place(case, device)
    handle = device.prepare(placed.program)
    device.run(handle)
    device.synchronize()
    tracemalloc.start()
    device.run(handle)
    device.synchronize()
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    unpacked = 4 * weights[0].n_elements  # of one of the four
    assert left < 100_000
    assert peak < unpacked / 4


def test_a_step_that_breaks_is_named(device: NumpyDevice) -> None:
    def broken() -> None:
        raise IndexError("out of step")

    case = CaseBuilder("broken")
    case.node(Op.SCALE, F32, (4,), (case.random(F32, 4),), (2.0, 0.0))
    placed = place(case, device)
    handle = device.prepare(placed.program)
    assert isinstance(handle, NumpyHandle)
    handle.steps = [(tensor, broken) for tensor, _ in handle.steps]
    device.run(handle)
    with pytest.raises(InternalError, match="SCALE scale0 of program case: out of step"):
        device.synchronize()


def test_a_device_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="one thread or more"):
        NumpyDevice("CPU", 0)


def test_meminfo_is_read_in_bytes(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2048 kB\nMemFree:  10 kB\nMemAvailable:    1024 kB\nHugePages_Total:       0\n")
    assert host_memory._from_meminfo(meminfo) == (2048 * 1024, 1024 * 1024)
    meminfo.write_text("MemTotal:       2048 kB\nMemFree:  10 kB\n")
    assert host_memory._from_meminfo(meminfo) == (2048 * 1024, 10 * 1024)
    assert host_memory._from_meminfo(tmp_path / "absent") is None


def test_a_container_has_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(host_memory, "_from_meminfo", lambda: (1 << 30, 1 << 29))
    monkeypatch.setattr(host_memory, "_CGROUP_FILES", ((limit, used),))
    assert host_memory.host_memory() == DeviceMemory(free_bytes=1 << 29, total_bytes=1 << 30)
    limit.write_text("max\n")
    used.write_text("4096\n")
    assert host_memory.host_memory().total_bytes == 1 << 30
    limit.write_text("1000000\n")
    assert host_memory.host_memory() == DeviceMemory(free_bytes=1000000 - 4096, total_bytes=1000000)
    used.write_text("2000000\n")
    assert host_memory.host_memory().free_bytes == 0
    limit.write_text(f"{1 << 40}\n")
    assert host_memory.host_memory().total_bytes == 1 << 30
