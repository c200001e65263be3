"""A client that never waits for anything is made to wait: what it can make a worker hold is bounded."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

import pytest

from app.rpc import workload
from app.rpc.workload import MAX_UNSEEN_BYTES, MAX_UNSEEN_CALLS
from tests.rpc.adder import Adder
from tests.rpc.far_end import in_thread
from tests.rpc.raw import COMPUTE, RawClient, frame, graph, tensor
from tests.rpc.workers import tcp_worker, wait_until

WAIT_S = 30.0


@pytest.fixture
def go_on() -> threading.Event:
    """Until it is set, the device computes."""
    return threading.Event()


@pytest.fixture
def adder(go_on: threading.Event) -> Iterator[Adder]:
    made = Adder()
    made.before_run = lambda: bool(go_on.wait(WAIT_S)) and None
    with tcp_worker(made) as worker:
        made.port = worker.port  # type: ignore[attr-defined]
        yield made
        go_on.set()


@pytest.fixture
def client(adder: Adder) -> Iterator[RawClient]:
    with RawClient(adder.port, timeout_s=WAIT_S) as connected:  # type: ignore[attr-defined]
        yield connected


def started(client: RawClient) -> tuple[bytes, int]:
    """A computation that lasts, on memory of its own, begun behind a bulk write so that the session goes on."""
    handle, base = client.alloc(1 << 20)
    record = tensor(1, handle, base, type_=24, ne=(1 << 20, 1, 1, 1), nb=(1, 1 << 20, 1 << 20, 1 << 20))
    client.set(record, bytes(1 << 20))
    a, r = tensor(1, handle, base), tensor(2, handle, base + 64, op=2, flags=COMPUTE, src=(1, 1))
    client.tell(10, graph(0, [2], [a, r]))
    return a, base


def queued(adder: Adder) -> int:
    return len(adder._lane._jobs)


FLOODS = {
    "runs": lambda base: frame(16, struct.pack("<I", 0)),
    "fills": lambda base: frame(17, tensor(1, 0x1000, base) + struct.pack("<QQB", 0, 16, 1)),
    "batches": lambda base: frame(133, struct.pack("<QI", base, 4) + b"abcd"),
    "events": lambda base: frame(1, struct.pack("<I", 0)),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=list(FLOODS))
def test_small_commands_pile_up_to_a_limit(
    adder: Adder, client: RawClient, go_on: threading.Event, flood: object
) -> None:
    a, base = started(client)
    one = flood(base)  # type: ignore[operator]
    n = 5000
    answers = n if one[0] == 1 else 0

    def drown() -> None:
        client.send(one * n)

    with in_thread(drown):
        wait_until(lambda: queued(adder) >= 200)
        highest = max(_after(0.01, adder) for _ in range(20))
        assert highest <= 2 * MAX_UNSEEN_CALLS + 8
        go_on.set()
    for _ in range(answers):
        client.answer()
    assert len(client.get(a, 16)) == 16


def _after(seconds: float, adder: Adder) -> int:
    threading.Event().wait(seconds)
    return queued(adder)


def test_bytes_pile_up_to_a_limit(
    adder: Adder, client: RawClient, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "MAX_UNSEEN_BYTES", 1 << 20)
    assert MAX_UNSEEN_BYTES == 64 << 20
    a, base = started(client)
    size = 100 << 10
    one = frame(133, struct.pack("<QI", base, size) + bytes(size))

    with in_thread(lambda: client.send(one * 100)):
        wait_until(lambda: queued(adder) >= 8)
        assert max(_after(0.01, adder) for _ in range(20)) <= 16
        go_on.set()
    assert len(client.get(a, 16)) == 16
