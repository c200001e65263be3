"""RpcDevice: which commands a caller's wishes become, and what it never sends."""

from __future__ import annotations

import gc
import os
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from app.engine.device import WeightHint
from app.engine.ggml import GGMLType, Op
from app.engine.program import Buffer, Program
from app.errors import DeviceError, DeviceLost, OutOfDeviceMemory, UnsupportedOp
from app.rpc import messages as m
from app.rpc.connect import connect
from app.rpc.device import RpcDevice
from app.rpc.lower import encode_graph
from app.rpc.wire import TENSOR, Command
from app.rpc.worker import WorkerSettings
from tests.rpc.adder import Adder
from tests.rpc.fake_worker import FakeWorker, framed
from tests.rpc.programs import placed, sum_program
from tests.rpc.workers import QUICK, connected, remote, tcp_worker, wait_until

MIB = 1 << 20
WAIT_S = 20.0
STOCK = WorkerSettings(extensions=False)
ONE, TWO = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)


@pytest.fixture
def fake() -> Iterator[FakeWorker]:
    with FakeWorker() as worker:
        yield worker


@pytest.fixture
def device(fake: FakeWorker) -> Iterator[RpcDevice]:
    (made,) = connect(fake.endpoint, timeouts=QUICK)
    fake.seen.clear()
    yield made
    made.close()


def kinds(fake: FakeWorker, device: RpcDevice) -> list[str]:
    """The commands since the last look, once all of them have arrived."""
    device.synchronize()
    seen = fake.commands()[:-1]
    fake.seen.clear()
    return seen


# -- graphs ---------------------------------------------------------------------------------------------------------


def test_a_graph_is_sent_once_and_then_named(fake: FakeWorker, device: RpcDevice) -> None:
    buffer = device.alloc(1024)
    first, second = device.prepare(sum_program(buffer)), device.prepare(sum_program(buffer, result=512))
    fake.seen.clear()
    for handle in (first, first, first, second, first, first):
        device.run(handle)
    assert kinds(fake, device) == [
        "GRAPH_COMPUTE", "GRAPH_RECOMPUTE", "GRAPH_RECOMPUTE", "GRAPH_COMPUTE", "GRAPH_COMPUTE", "GRAPH_RECOMPUTE",
    ]  # fmt: skip


def test_a_free_forgets_stored_graphs(fake: FakeWorker, device: RpcDevice) -> None:
    buffer, other = device.alloc(1024), device.alloc(64)
    handle = device.prepare(sum_program(buffer))
    fake.seen.clear()
    device.run(handle)
    device.free(other)
    device.run(handle)
    assert kinds(fake, device) == ["GRAPH_COMPUTE", "FREE_BUFFER", "GRAPH_COMPUTE"]


def test_devices_that_share_a_connection_have_stored_graphs_of_their_own() -> None:
    with FakeWorker(devices=2) as fake:
        devices = connect(fake.endpoint, timeouts=QUICK)
        handles = [device.prepare(sum_program(device.alloc(1024))) for device in devices]
        fake.seen.clear()
        for _ in range(2):
            for device, handle in zip(devices, handles, strict=True):
                device.run(handle)
        assert kinds(fake, devices[0]) == ["GRAPH_COMPUTE", "GRAPH_COMPUTE", "GRAPH_RECOMPUTE", "GRAPH_RECOMPUTE"]
        for device in devices:
            device.close()


def test_a_graph_on_freed_memory_is_never_sent(fake: FakeWorker, device: RpcDevice) -> None:
    """A stock worker would end its whole process over it."""
    buffer = device.alloc(1024)
    handle = device.prepare(sum_program(buffer))
    device.free(buffer)
    device.synchronize()
    fake.seen.clear()
    device.run(handle)
    with pytest.raises(DeviceError, match="cannot run sum: a buffer that it uses was freed"):
        device.synchronize()
    assert kinds(fake, device) == []


def test_a_decode_step_is_small() -> None:
    """Inputs, the graph's name, one read: well under 2 KiB of requests besides the activation itself."""
    activation = np.zeros(576 * 4, np.uint8)
    small = [np.zeros(n, np.uint8) for n in (4, 8, 4, 2)]
    for settings, limit_bytes in ((WorkerSettings(), 150), (STOCK, 2048)):
        with remote(Adder(), settings) as device:
            buffer = device.alloc(16384)
            handle = device.prepare(sum_program(buffer))
            device.run(handle)
            device.read(buffer, 0, activation.size).result(WAIT_S)
            before = device.link.dispatcher.stats()
            for i, payload in enumerate((activation, *small)):
                device.write(buffer, 4096 + 64 * i, payload)
            device.run(handle)
            device.read(buffer, 0, activation.size).result(WAIT_S)
            after = device.link.dispatcher.stats()
            assert after.sent_bytes - before.sent_bytes - activation.size <= limit_bytes
            assert after.answers - before.answers == 1


def test_a_tandem_worker_says_what_it_cannot_run() -> None:
    with remote(Adder()) as device:
        buffer = device.alloc(1024)
        bad = sum_program(buffer)
        bad = replace(bad, tensors=(*bad.tensors[:2], replace(bad.tensors[2], op=Op.MUL)))
        with pytest.raises(UnsupportedOp, match="this device only adds"):
            device.prepare(bad)
        device.run(device.prepare(sum_program(buffer)))
        device.synchronize()


def test_preparing_does_not_wait_for_what_is_being_computed() -> None:
    adder, goes_on = Adder(), threading.Event()
    adder.before_run = lambda: None if goes_on.wait(WAIT_S) else pytest.fail("nobody went on")
    with remote(adder) as device:
        buffer = device.alloc(1024)
        first, bad = sum_program(buffer), sum_program(buffer)
        bad = replace(bad, tensors=(*bad.tensors[:2], replace(bad.tensors[2], op=Op.MUL)))
        device.run(device.prepare(first))
        computing = device.read(buffer, 0, 4)
        handle, refused = device.prepare(first), device.prepare(bad)
        device.run(handle)
        assert not computing.done()
        goes_on.set()
        device.synchronize()
        device.run(refused)
        with pytest.raises(DeviceError, match="this device only adds"):
            device.synchronize()
        device.run(handle)
        device.synchronize()


def test_a_tandem_worker_says_why_it_hangs_up() -> None:
    adder = Adder()
    with remote(adder) as device:
        buffer = device.alloc(1024)
        handle = device.prepare(sum_program(buffer))

        def fail() -> None:
            raise DeviceError("the oven is out of gas")

        adder.before_run = fail
        device.run(handle)
        with pytest.raises(DeviceLost, match="the oven is out of gas"):
            device.synchronize()
        with pytest.raises(DeviceLost, match="the oven is out of gas"):
            device.write(buffer, 0, ONE)


# -- several workers ------------------------------------------------------------------------------------------------


def test_three_workers_with_equal_addresses_get_their_own_only() -> None:
    """Handles and addresses of one worker are numbers to the others, and the same numbers at that."""
    with FakeWorker() as a, FakeWorker() as b, FakeWorker() as c:
        fakes = (a, b, c)
        devices = [connect(fake.endpoint, first_index=i, timeouts=QUICK)[0] for i, fake in enumerate(fakes)]
        buffers = [device.alloc(1024) for device in devices]
        assert len({(buffer.address.remote_ptr, buffer.address.base) for buffer in buffers}) == 1
        for device, own, fake in zip(devices, buffers, fakes, strict=True):
            mentioned = [placed(buffer, 64 * i, name=f"of {i}") for i, buffer in enumerate(buffers)]
            graph = encode_graph(Program("p", tuple(mentioned), ()), device.link.locate, device.name)
            records = list(TENSOR.iter_unpack(graph[8:]))
            for buffer, record in zip(buffers, records, strict=True):
                address = buffer.address
                expected = (address.remote_ptr, address.base + record_offset(record)) if buffer is own else (0, 0)
                assert (record[2], record[41]) == expected
            with pytest.raises(DeviceError, match="does not belong|not one of"):
                device.prepare(sum_program(next(other for other in buffers if other is not own)))
            assert "GRAPH_COMPUTE" not in fake.commands()
        for device in devices:
            device.close()


def record_offset(record: tuple[object, ...]) -> int:
    return 64 * int(bytes(record[42]).rstrip(b"\0").decode().removeprefix("of "))  # type: ignore[arg-type]


# -- events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [WorkerSettings(), STOCK], ids=["tandem", "stock"])
@pytest.mark.parametrize("wait", ["record", "read"])
def test_an_event_waits_for_the_computation_and_not_for_the_write(settings: WorkerSettings, wait: str) -> None:
    adder = Adder()
    slow, done_at = threading.Event(), []

    def compute_slowly() -> None:
        slow.wait(0.3)
        done_at.append(time.monotonic())

    with remote(adder, settings) as device:
        buffer = device.alloc(1024)
        handle = device.prepare(sum_program(buffer))
        adder.before_run = compute_slowly
        began = time.monotonic()
        device.run(handle)
        event: Future[object] = device.record() if wait == "record" else device.read(buffer, 0, 16)  # type: ignore[assignment]
        assert time.monotonic() - began < 0.2
        assert not event.done()
        event.result(WAIT_S)
        assert done_at and time.monotonic() >= done_at[0] >= began + 0.29


def test_many_events_leave_nothing_behind() -> None:
    with remote(Adder()) as device:
        for _ in range(1000):
            device.record()
        device.synchronize()
        before = footprint()
        for _ in range(100):
            events = [device.record() for _ in range(999)]
            events[-1].result(WAIT_S)
            events[0].result(WAIT_S)
            device.record()
        device.synchronize()
        del events
        rss, threads, descriptors, objects = footprint()
        assert (threads, descriptors) == before[1:3]
        assert objects - before[3] < 500
        assert rss - before[0] < 8 * MIB


def footprint() -> tuple[int, int, int, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return rss, threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())


# -- memory ---------------------------------------------------------------------------------------------------------


def test_a_refused_allocation_names_device_and_bytes() -> None:
    with FakeWorker(may_alloc=lambda size: size < MIB, memory=(4 << 20, 8 << 30)) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        with pytest.raises(OutOfDeviceMemory, match=f"RPC0.{fake.endpoint}. refused an allocation of 1.0 MiB") as e:
            device.alloc(MIB)
        assert e.value.free_bytes == 4 << 20
        assert device.alloc(MIB - 1).size_bytes == MIB - 1
        device.close()


def test_a_buffer_smaller_than_asked_for_is_given_back() -> None:
    answer = framed(struct.pack("<QQ", 0xB0F, 99))
    with FakeWorker(override={Command.ALLOC_BUFFER: lambda _: answer}) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        with pytest.raises(OutOfDeviceMemory):
            device.alloc(100)
        device.synchronize()
        assert m.FreeBuffer(0xB0F) in fake.seen
        device.close()


def test_a_refusal_is_told_even_if_the_worker_does_not_say_what_is_free() -> None:
    override = {Command.ALLOC_BUFFER: lambda _: framed(bytes(16)), Command.GET_DEVICE_MEMORY: lambda _: None}
    with FakeWorker(override=override) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        with pytest.raises(OutOfDeviceMemory, match="refused an allocation of 100 bytes; use") as caught:
            device.alloc(100)
        assert caught.value.free_bytes is None
        device.close()


def test_a_buffer_above_the_workers_limit_is_not_even_asked_for() -> None:
    with FakeWorker(max_size=MIB) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        with pytest.raises(OutOfDeviceMemory):
            device.alloc(MIB + 1)
        assert "ALLOC_BUFFER" not in fake.commands()
        device.close()


@pytest.mark.parametrize("figures", [(0, 0), (1 << 63, 1), (4 << 20, 8 << 30)])
def test_memory_figures_are_passed_on_as_they_are(figures: tuple[int, int]) -> None:
    with FakeWorker(memory=figures) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        memory = device.memory()
        assert (memory.free_bytes, memory.total_bytes) == figures
        device.close()


def test_a_limit_is_enforced_and_reported() -> None:
    with remote(Adder(), WorkerSettings(mem_bytes=MIB)) as device:
        assert (device.memory().free_bytes, device.memory().total_bytes) == (MIB, MIB)
        buffer = device.alloc(MIB // 2)
        assert device.memory().free_bytes == MIB // 2
        with pytest.raises(OutOfDeviceMemory):
            device.alloc(MIB // 2 + 1)
        device.free(buffer)
        assert device.memory().free_bytes == MIB


# -- allocation sizes -----------------------------------------------------------------------------------------------

KEYS = placed(None, name="k", ne=(64, 256, 2, 1))
ATTENTION = placed(None, name="out", ne=(64, 4, 8, 1), op=Op.FLASH_ATTN_EXT)


def test_sizes_are_asked_once_per_output_and_sources(fake: FakeWorker, device: RpcDevice) -> None:
    longer = replace(KEYS, ne=(64, 512, 2, 1))
    for sources in ((KEYS,), (KEYS,), (longer,), (longer,), (KEYS,)):
        device.alloc_bytes(ATTENTION, sources)
    asked = [request for request in fake.seen if isinstance(request, m.GetAllocSize)]
    assert [request.sources[0].ne[1] for request in asked] == [256, 512]
    assert all(source == type(source)() for source in asked[0].sources[1:])


def test_plain_tensors_are_not_asked_about(fake: FakeWorker, device: RpcDevice) -> None:
    assert device.alloc_bytes(placed(None, op=Op.ADD), ()) == 16
    assert device.alloc_bytes(placed(None, type_=GGMLType.Q4_0, ne=(512, 2, 1, 1)), ()) == 576
    assert kinds(fake, device) == []
    device.alloc_bytes(placed(None, type_=GGMLType.Q4_0, ne=(256, 2, 1, 1)), ())
    assert kinds(fake, device) == ["GET_ALLOC_SIZE"]


def test_an_answer_below_the_tensors_own_size_is_not_believed() -> None:
    with FakeWorker(override={Command.GET_ALLOC_SIZE: lambda _: framed(struct.pack("<Q", 1))}) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        assert device.alloc_bytes(ATTENTION, (KEYS,)) == ATTENTION.n_bytes
        device.close()


def test_a_stride_of_four_gibibytes_is_refused_before_anything_is_sent(fake: FakeWorker, device: RpcDevice) -> None:
    big = placed(None, name="cache", type_=GGMLType.F16, ne=(128, 8, 2097154, 2), op=Op.FLASH_ATTN_EXT)
    with pytest.raises(UnsupportedOp, match="stride of 4294971392 bytes"):
        device.alloc_bytes(big, ())
    assert kinds(fake, device) == []


def test_padded_rows_are_initialised_once(fake: FakeWorker, device: RpcDevice) -> None:
    buffer = device.alloc(4096)
    weight = placed(buffer, 512, name="w", type_=GGMLType.Q4_0, ne=(64, 2, 1, 1))
    whole = placed(buffer, 1024, name="whole", type_=GGMLType.Q4_0, ne=(512, 2, 1, 1))
    program = sum_program(buffer)
    program = replace(program, tensors=(*program.tensors, weight, whole))
    device.prepare(program)
    device.prepare(program)
    device.synchronize()
    initialised = [request.tensor for request in fake.seen if isinstance(request, m.InitTensor)]
    assert [tensor.data - buffer.address.base for tensor in initialised] == [512]


# -- bytes ----------------------------------------------------------------------------------------------------------


def hint(data: bytes, content_hash: int | None) -> WeightHint:
    source = None if content_hash is None else lambda: content_hash
    return WeightHint("w", GGMLType.F32, (len(data) // 4, 1, 1, 1), source)


@pytest.mark.parametrize("has_it", [False, True])
def test_a_weight_is_offered_by_its_hash(has_it: bool) -> None:
    data = bytes(11 * MIB)
    with FakeWorker(override={Command.SET_TENSOR_HASH: lambda _: framed(bytes([has_it]))}) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        buffer = device.alloc(len(data))
        fake.seen.clear()
        sent = device.write(buffer, 0, data, hint=hint(data, 0xABCD))
        device.write(buffer, 0, b"after")
        device.synchronize()
        assert sent.done()
        offered = next(request for request in fake.seen if isinstance(request, m.SetTensorHash))
        assert (offered.hash, offered.tensor.ne[0]) == (0xABCD, len(data))
        sets = [request for request in fake.seen if isinstance(request, m.SetTensor)]
        assert [(request.tensor.ne[0], request.cache) for request in sets] == [(len(data), 1), (5, 0)][has_it:]
        device.close()


def test_hashing_for_one_worker_holds_up_no_other() -> None:
    data = bytes(11 * MIB)
    hashed = threading.Event()

    def slow_hash() -> int:
        assert hashed.wait(WAIT_S)
        return 0xABCD

    with FakeWorker() as first, FakeWorker() as second:
        (slow,), (quick,) = (connect(fake.endpoint, timeouts=QUICK) for fake in (first, second))
        late = slow.write(slow.alloc(len(data)), 0, data, hint=WeightHint("w", GGMLType.I8, (1, 1, 1, 1), slow_hash))
        behind = slow.record()
        quick.write(quick.alloc(len(data)), 0, data, hint=hint(data, 1)).result(WAIT_S)
        quick.synchronize()
        assert len(second.payloads) == 1
        assert not late.done() and not behind.done()
        assert "SET_TENSOR_HASH" not in first.commands()
        hashed.set()
        late.result(WAIT_S)
        behind.result(WAIT_S)
        assert next(r for r in first.seen if isinstance(r, m.SetTensorHash)).hash == 0xABCD
        assert len(first.payloads) == 1
        slow.close()
        quick.close()


def test_a_hash_that_cannot_be_computed_fails_its_write_and_the_next_event() -> None:
    def broken() -> int:
        raise OSError("the model file is gone")

    with FakeWorker() as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        buffer = device.alloc(11 * MIB)
        sent = device.write(buffer, 0, bytes(11 * MIB), hint=WeightHint("w", GGMLType.I8, (1, 1, 1, 1), broken))
        for future in (sent, device.record()):
            with pytest.raises(OSError, match="the model file is gone"):
                future.result(WAIT_S)
        assert not fake.payloads
        device.synchronize()
        device.close()


def test_a_stock_worker_is_not_asked_for_small_weights(fake: FakeWorker, device: RpcDevice) -> None:
    buffer = device.alloc(MIB)
    device.write(buffer, 0, bytes(MIB), hint=hint(bytes(MIB), 1))
    assert kinds(fake, device) == ["ALLOC_BUFFER", "BUFFER_GET_BASE", "SET_TENSOR"]


def test_what_is_no_weight_is_cut_for_6_0() -> None:
    data = np.random.default_rng(3).integers(0, 256, 11 * MIB, np.uint8)
    with FakeWorker(version=(6, 0, 0)) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        buffer = device.alloc(data.size)
        device.write(buffer, 0, data).result(WAIT_S)
        device.write(buffer, 0, data, hint=hint(data.tobytes(), None)).result(WAIT_S)
        device.synchronize()
        assert [len(payload) for payload in fake.payloads] == [10 * MIB, MIB, 11 * MIB]
        assert b"".join(fake.payloads) == data.tobytes() * 2
        device.close()


def test_small_writes_are_copied_and_travel_with_the_next_command(fake: FakeWorker, device: RpcDevice) -> None:
    buffer = device.alloc(1024)
    payload = bytearray(b"before")
    assert device.write(buffer, 0, payload).done()
    payload[:] = b"after!"
    assert bytes(device.read(buffer, 0, 6).result(WAIT_S)) == b"before"


def test_a_copy_that_a_worker_refuses_is_done_by_hand(fake: FakeWorker, device: RpcDevice) -> None:
    buffer = device.alloc(1024)
    device.write(buffer, 0, bytes(range(64)))
    device.synchronize()
    fake.seen.clear()
    device.copy(buffer, 0, buffer, 128, 64)
    device.write(buffer, 0, bytes(64))
    assert bytes(device.read(buffer, 128, 64).result(WAIT_S)) == bytes(range(64))
    assert fake.commands() == ["COPY_TENSOR", "GET_TENSOR", "SET_TENSOR", "SET_TENSOR", "GET_TENSOR"]
    fake.seen.clear()
    device.copy(buffer, 128, buffer, 256, 64)
    assert bytes(device.read(buffer, 256, 64).result(WAIT_S)) == bytes(range(64))
    assert fake.commands() == ["GET_TENSOR", "SET_TENSOR", "GET_TENSOR"]


def test_a_copy_that_works_needs_no_fallback() -> None:
    with FakeWorker(override={Command.COPY_TENSOR: lambda _: framed(b"\1")}) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        buffer = device.alloc(1024)
        fake.seen.clear()
        for _ in range(3):
            device.copy(buffer, 0, buffer, 128, 64)
        assert kinds(fake, device) == ["COPY_TENSOR"] * 3
        device.close()


def test_fill_takes_the_shortest_command(fake: FakeWorker, device: RpcDevice) -> None:
    buffer = device.alloc(1024)
    fake.seen.clear()
    device.fill(buffer, 0, 1024, 7)
    device.fill(buffer, 16, 32, 8)
    assert kinds(fake, device) == ["BUFFER_CLEAR", "MEMSET_TENSOR"]


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_worker_that_goes_takes_every_call_with_it() -> None:
    with FakeWorker() as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        buffer = device.alloc(1024)
        handle = device.prepare(sum_program(buffer))
        later: Future[bytes] = Future()
        write = device.write(buffer, 0, later, size_bytes=16)
        read = device.read(buffer, 0, 16)
        fake.hang_up()
        for future in (write, read):
            with pytest.raises(DeviceLost, match=fake.endpoint):
                future.result(WAIT_S)
        calls = (
            lambda: device.write(buffer, 0, b"x"),
            lambda: device.read(buffer, 0, 1),
            lambda: device.run(handle),
            lambda: device.record(),
            lambda: device.alloc(1),
            lambda: device.memory(),
            lambda: device.fill(buffer, 0, 1, 0),
            lambda: device.copy(buffer, 0, buffer, 64, 1),
            lambda: device.prepare(sum_program(buffer)),
            lambda: device.free(buffer),
            lambda: device.release(handle),
        )
        for call in calls:
            with pytest.raises(DeviceLost, match=fake.endpoint):
                call()
        device.close()
        device.close()


def test_a_loss_is_told_once_and_closing_is_no_loss() -> None:
    told: list[DeviceLost] = []
    with FakeWorker() as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        device.watch(told.append)
        fake.hang_up()
        wait_until(lambda: bool(told))
        device.watch(told.append)
        device.close()
        assert [lost.endpoint for lost in told] == [fake.endpoint] * 2
    told.clear()
    with FakeWorker() as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        device.watch(told.append)
        device.close()
    assert told == []


def test_memory_is_freed_when_a_client_goes() -> None:
    adder = Adder()
    with tcp_worker(adder) as worker:
        with connected(worker) as (device,):
            device.alloc(MIB)
            assert adder.used_bytes == MIB
        with connected(worker) as (device,):
            assert device.memory().free_bytes >= 0
            deadline = time.monotonic() + WAIT_S
            while adder.used_bytes and time.monotonic() < deadline:
                device.memory()
            assert adder.used_bytes == 0


def test_results_are_right_whatever_the_worker_announces() -> None:
    older = WorkerSettings(version=(6, 0))
    for settings in (WorkerSettings(), STOCK, older, replace(older, extensions=False)):
        with remote(Adder(), settings, memory=True) as device:
            buffer: Buffer = device.alloc(1024)
            handle = device.prepare(sum_program(buffer))
            for i in range(3):
                device.write(buffer, 0, ONE * i)
                device.write(buffer, 128, TWO)
                device.run(handle)
                got = np.frombuffer(device.read(buffer, 256, 16).result(WAIT_S), np.float32)
                assert (got == ONE * i + TWO).all()
