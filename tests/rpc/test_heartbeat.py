"""A worker that stops answering is noticed on the side, however patient its other connections are."""

from __future__ import annotations

import struct
import threading

import pytest

from app.errors import DeviceLost
from app.rpc.connect import connect
from app.rpc.endpoint import Timeouts
from app.rpc.wire import Command
from tests.rpc.adder import Adder
from tests.rpc.fake_worker import FakeWorker, framed
from tests.rpc.programs import sum_program
from tests.rpc.workers import connected, tcp_worker

QUICK_PULSE = Timeouts(answer_s=600, heartbeat_s=0.02, patience_s=0.2)
DESCRIPTION = b'{"devices": [{"kernel_variant": "k", "description": "d"}], "keeps_weights": false}'
WAIT_S = 20.0


def tandem(**override: object) -> FakeWorker:
    answers = {Command.DESCRIBE: lambda _: framed(DESCRIPTION), Command.GET_ALIGNMENT: once()}
    return FakeWorker(pad=0x54, override={**answers, Command.PING: override["ping"]})  # type: ignore[dict-item]


def once():  # type: ignore[no-untyped-def]
    """Answers the question of `connect`; events are left waiting."""
    asked = []

    def answer(request: object) -> bytes:
        asked.append(request)
        return framed(struct.pack("<Q", 32)) if len(asked) == 1 else b""

    return answer


@pytest.mark.parametrize(
    ("ping", "cause"),
    [
        (lambda request: b"", "no heartbeat within 0.2 s"),
        (lambda request: framed(struct.pack("<Q", request.nonce + 1)), "heartbeat 1 was answered with 2"),
        (lambda request: None, "the heartbeat ended"),
    ],
    ids=["silent", "confused", "gone"],
)
def test_a_worker_without_a_pulse_is_lost(ping: object, cause: str) -> None:
    with tandem(ping=ping) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK_PULSE)
        event = device.record()
        with pytest.raises(DeviceLost, match=cause):
            event.result(WAIT_S)
        with pytest.raises(DeviceLost, match=cause):
            device.memory()
        device.close()


def test_a_busy_worker_has_a_pulse() -> None:
    adder, go_on = Adder(), threading.Event()
    with tcp_worker(adder) as worker, connected(worker, QUICK_PULSE) as (device,):
        handle = device.prepare(sum_program(device.alloc(1024)))
        adder.before_run = lambda: bool(go_on.wait(WAIT_S)) and None
        device.run(handle)
        event = device.record()
        threading.Event().wait(0.5)  # more than twice the patience
        assert not event.done()
        go_on.set()
        event.result(WAIT_S)
