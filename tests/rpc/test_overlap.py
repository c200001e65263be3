"""A worker that computes still receives the next input, and answers in order when the bytes are there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from app.errors import DeviceLost
from app.rpc.answers import Staging
from app.rpc.device import RpcDevice
from app.rpc.worker import WorkerSettings
from tests.rpc.adder import Adder
from tests.rpc.programs import sum_program
from tests.rpc.workers import connected, tcp_worker

MIB = 1 << 20
WAIT_S = 30.0
#: More than the sockets on both sides hold.
LARGE_BYTES = 24 * MIB


@pytest.fixture
def adder() -> Adder:
    return Adder()


@pytest.fixture(params=[True, False], ids=["tandem", "stock protocol"])
def far(adder: Adder, request: pytest.FixtureRequest) -> Iterator[RpcDevice]:
    with tcp_worker(adder, settings=WorkerSettings(extensions=request.param)) as worker, connected(worker) as devices:
        yield devices[0]


def ubatch(first: float) -> np.ndarray:
    """A boundary whose first eight floats are the terms of a sum."""
    data = np.zeros(MIB, np.float32)
    data[:4], data[32:36] = first, 1000
    return data


def test_the_next_input_is_received_while_the_device_computes(adder: Adder, far: RpcDevice) -> None:
    go_on = threading.Event()
    buffer = far.alloc(LARGE_BYTES)
    handle = far.prepare(sum_program(buffer))
    adder.before_run = lambda: bool(go_on.wait(WAIT_S)) and None
    far.write(buffer, 0, ubatch(1).data.cast("B"))
    far.run(handle)
    answer = far.read(buffer, 256, 16)
    far.write(buffer, 0, np.zeros(LARGE_BYTES, np.uint8).data).result(WAIT_S)
    event = far.record()
    assert not answer.done() and not event.done()
    go_on.set()
    assert np.frombuffer(answer.result(WAIT_S), np.float32)[0] == 1001
    event.result(WAIT_S)


def test_ubatches_in_flight_get_their_own_answers_in_order(far: RpcDevice) -> None:
    buffer = far.alloc(8 * MIB)
    handle = far.prepare(sum_program(buffer))
    answers = []
    for number in range(40):  # more than may wait at the worker
        far.write(buffer, 0, ubatch(number).data.cast("B"))
        far.write(buffer, 512, bytes([number] * 16))
        far.run(handle)
        answers.append((far.read(buffer, 256, 4 * MIB - 256), far.record()))
    for number, (answer, event) in enumerate(answers):
        got = answer.result(WAIT_S)
        assert np.frombuffer(got[:16], np.float32).tolist() == [1000 + number] * 4
        assert bytes(got[256:272]) == bytes([number] * 16)
        event.result(WAIT_S)


def test_a_graph_that_fails_is_not_answered(adder: Adder, far: RpcDevice) -> None:
    go_on = threading.Event()

    def fail() -> None:
        go_on.wait(WAIT_S)
        raise ValueError("broken")

    adder.before_run = fail
    buffer = far.alloc(8 * MIB)
    handle = far.prepare(sum_program(buffer))
    far.write(buffer, 0, ubatch(1).data.cast("B"))
    far.run(handle)
    answers = [far.read(buffer, 0, 64), far.record(), far.read(buffer, 0, 4 * MIB)]
    go_on.set()
    for answer in answers:
        with pytest.raises(DeviceLost):
            answer.result(WAIT_S)


def test_staging_keeps_to_its_limit_and_uses_memory_again() -> None:
    staging = Staging(limit_bytes=100)
    first = staging.take(60)
    assert first is not None and staging.take(60) is None
    staging.give(first)
    again = staging.take(60)
    assert again is not None and again.obj is first.obj
    assert staging.take(40) is not None and staging.take(1) is None
