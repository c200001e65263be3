"""Masks travel as recipes to workers that make them, in their turn; recipes that make no sense end the session."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.engine.mask import MAX_PACKED_BYTES, CellRun, MaskRecipe, MaskRows
from app.rpc import messages as m
from app.rpc import session as sessions
from app.rpc.connect import connect
from app.rpc.device import RpcDevice
from app.rpc.link import RpcBuffer
from app.rpc.protocol import RequestParser, encode
from app.rpc.session import Session
from app.rpc.specs import SPECS
from app.rpc.transfers import BATCH_ITEM, SMALL_BYTES, Riders
from app.rpc.wire import Command
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.gated import Gated
from tests.rpc.programs import sum_program
from tests.rpc.raw import RawClient
from tests.rpc.workers import QUICK, connected, remote, tcp_worker

WRITE_MASK, WRITE_BATCH, READ_REGION = 146, 133, 134
WAIT_S = 30.0
ROOM = 64 << 10

#: Rows of a prompt, a decoding one and padding; 40 KiB.
MIXED = MaskRecipe(
    16, 1280, None, (MaskRows(0, 12, (CellRun(0, 64), CellRun(128, 300))), MaskRows(12, 1, (CellRun(512, 1),)))
)
WINDOWED = MaskRecipe(16, 1280, 20, MIXED.sequences)
#: So large that what follows belongs to a prompt; 128 KiB.
LARGE = MaskRecipe(64, 1024, None, (MaskRows(0, 64, (CellRun(64, 900),)),))


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with tcp_worker(NumpyDevice()) as made:
        yield made


@pytest.fixture
def client(worker: Worker) -> Iterator[RawClient]:
    with RawClient(worker.port) as made:
        yield made


@pytest.mark.parametrize("recipe", [MIXED, WINDOWED], ids=["whole past", "windowed"])
def test_a_recipe_becomes_a_mask_and_nothing_around_it_changes(client: RawClient, recipe: MaskRecipe) -> None:
    handle, base = client.alloc(ROOM)
    client.tell(5, struct.pack("<QB", handle, 7))
    client.tell(WRITE_MASK, struct.pack("<Q", base + 128) + recipe.packed)
    got = client.ask(READ_REGION, struct.pack("<QQ", base, ROOM))
    end = 128 + recipe.n_bytes
    assert got[128:end] == recipe.array.tobytes()
    assert set(got[:128]) == set(got[end:]) == {7}


@pytest.mark.parametrize(
    ("offset", "packed", "reason"),
    [
        (0, b"", "WRITE_MASK: 0 bytes are no recipe"),
        (0, MIXED.packed[:-1], "bytes are no recipe"),
        (0, MIXED.packed[:-4], "ends before the last of them"),
        (0, MIXED.packed + bytes(4), "4 bytes follow"),
        (0, bytes(MAX_PACKED_BYTES + 4), "at most 65536 are taken"),
        (0, words(1, 8, 0, 1, 1, 1, 1, 0, 1), "1 rows from 1 on"),
        (0, words(1, 8, 0, 1, 0, 1, 1, 8, 1), "a run of 1 cells from 8 on"),
        (0, words(33, 1024, 0, 0), "67584 bytes at address"),
        (ROOM - 14, words(1, 8, 0, 0), "16 bytes at address"),
        (-2, words(1, 8, 0, 0), "16 bytes at address"),
        (0, words(1 << 16, 1 << 24, 0, 0), "2199023255552 bytes at address"),
        (3, words(1, 8, 0, 0), "half floats cannot begin at byte 3"),
    ],
)
def test_senseless_masks_end_the_session_and_no_other(
    worker: Worker, client: RawClient, offset: int, packed: bytes, reason: str
) -> None:
    _, base = client.alloc(ROOM)
    client.tell(WRITE_MASK, struct.pack("<Q", base + offset) + packed)
    notice = b""
    while part := client.sock.recv(4096):
        notice += part
    assert notice[:8] == b"\xff" * 8 and reason in notice[12:].decode()
    with RawClient(worker.port) as other:
        assert other.alloc(64)[0]


def test_nothing_is_written_to_the_memory_of_another_client(worker: Worker, client: RawClient) -> None:
    _, base = client.alloc(ROOM)
    with RawClient(worker.port) as other:
        other.alloc(ROOM)
        other.tell(WRITE_MASK, struct.pack("<Q", base) + MIXED.packed)
        assert other.sock.recv(8) == b"\xff" * 8
    assert client.ask(READ_REGION, struct.pack("<QQ", base, ROOM)) == bytes(ROOM)


class Copying(Gated):
    """Takes masks as bytes."""

    builds_masks = False
    write_mask = Device.write_mask


@pytest.mark.parametrize("make", [Gated, Copying])
def test_a_mask_behind_a_running_graph_waits_for_it_and_holds_nobody_up(make: type[Gated]) -> None:
    """The masks lie over the terms of a sum: each run must see what was there when it was asked for."""
    device = make()
    with tcp_worker(device) as worker, connected(worker) as (far,):
        buffer = far.alloc(24 << 20)
        handle = far.prepare(sum_program(buffer))
        sums, reads = [], []
        for recipe in (LARGE, WINDOWED, MIXED, LARGE):
            far.write_mask(buffer, 0, recipe)
            far.run(handle)
            reads.append(far.read(buffer, 256, 16))
            terms = recipe.array.reshape(-1).view(np.float32)
            with np.errstate(invalid="ignore"):
                sums.append((terms[:4] + terms[32:36]).tobytes())
        far.write(buffer, 1 << 20, bytes(20 << 20)).result(WAIT_S)  # goes by all of them
        assert not any(read.done() for read in reads)
        device.gate.set()
        assert [bytes(read.result(WAIT_S)) for read in reads] == sums
        want = bytearray(LARGE.array.tobytes())
        want[256:272] = sums[-1]
        assert bytes(far.read(buffer, 0, LARGE.n_bytes).result(WAIT_S)) == want


def sent_for(far: RpcDevice, recipe: MaskRecipe) -> tuple[int, int, bytes]:
    """WRITE_MASK commands and bytes sent for a mask, and what is at the far end then."""
    buffer = far.alloc(ROOM)
    far.synchronize()
    before = far.link.dispatcher.stats()
    far.write_mask(buffer, 64, recipe).result(WAIT_S)
    far.synchronize()
    after = far.link.dispatcher.stats()
    got = bytes(far.read(buffer, 64, recipe.n_bytes).result(WAIT_S))
    n_masks = after.commands.get("WRITE_MASK", 0) - before.commands.get("WRITE_MASK", 0)
    return n_masks, after.sent_bytes - before.sent_bytes, got


def test_a_worker_that_makes_masks_gets_the_recipe() -> None:
    with remote(NumpyDevice()) as far:
        n_masks, n_bytes, got = sent_for(far, MIXED)
        assert far.builds_masks and n_masks == 1 and got == MIXED.array.tobytes()
        assert n_bytes < 150


def test_short_masks_and_long_recipes_travel_as_bytes() -> None:
    """The first are part of a turn, the second are refused."""
    short = MaskRecipe(1, SMALL_BYTES // 2, None, (MaskRows(0, 1, (CellRun(5, 700),)),))
    scattered = tuple(MaskRows(row, 1, tuple(CellRun(2 * i, 1) for i in range(500))) for row in range(32))
    long = MaskRecipe(32, 1000, None, scattered)
    assert len(long.packed) > MAX_PACKED_BYTES
    with remote(NumpyDevice()) as far:
        for recipe in (short, long):
            n_masks, n_bytes, got = sent_for(far, recipe)
            assert n_masks == 0 and n_bytes > recipe.n_bytes and got == recipe.array.tobytes()


@pytest.mark.parametrize("version", [(6, 0), (7, 0)])
def test_a_stock_worker_gets_bytes(version: tuple[int, int]) -> None:
    with remote(NumpyDevice(), WorkerSettings(version=version, extensions=False)) as far:
        n_masks, _, got = sent_for(far, MIXED)
        assert not far.builds_masks and n_masks == 0 and got == MIXED.array.tobytes()


def test_an_older_worker_of_ours_gets_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(session: Session, request: m.Describe) -> None:
        one = {"kind": "numpy", "kernel_variant": "numpy", "description": "old"}
        told = {"devices": [one], "keeps_weights": False, "pushes": True, "selects_rows": True, "takes_turns": True}
        session.answer_text(json.dumps(told).encode())

    old = {**sessions._HANDLERS, Command.DESCRIBE: describe}
    del old[Command.WRITE_MASK]
    monkeypatch.setattr(sessions, "_HANDLERS", old)
    with tcp_worker(NumpyDevice()) as worker:
        (far,) = connect(f"127.0.0.1:{worker.port}", timeouts=QUICK)
        n_masks, _, got = sent_for(far, MIXED)
        assert far.link.takes_turns and not far.builds_masks and n_masks == 0 and got == MIXED.array.tobytes()
        far.close()


def test_a_mask_rides_with_small_writes_and_the_run_in_order() -> None:
    with remote(NumpyDevice()) as far:
        buffer = far.alloc(ROOM)
        assert isinstance(buffer, RpcBuffer)
        base = buffer.address.base
        riders = Riders(batched=True)
        mask = encode(m.WriteMask(base, memoryview(b"")), (7, 0), len(MIXED.packed)) + MIXED.packed
        riders.add_write(buffer, 0, memoryview(b"ab"))
        riders.add_mask("WRITE_MASK", mask)
        riders.add_write(buffer, 4, memoryview(b"cd"))
        riders.add_run("GRAPH_RUN", encode(m.GraphRun(0, 5), (7, 0)))
        assert riders.take_turn() is None
        taken, commands = riders.take()
    assert commands == ("SET_TENSOR", "WRITE_MASK", "SET_TENSOR", "GRAPH_RUN")
    parser = RequestParser((7, 0))
    parser.feed(encode(m.Hello(), (7, 0)) + taken)
    assert parser.next_request() == m.Hello()
    assert parser.next_request() == m.WriteBatch(memoryview(BATCH_ITEM.pack(base, 2) + b"ab"))
    assert parser.next_request() == m.WriteMask(base, memoryview(MIXED.packed))
    assert parser.next_request() == m.WriteBatch(memoryview(BATCH_ITEM.pack(base + 4, 2) + b"cd"))
    assert parser.next_request() == m.GraphRun(0, 5)
    assert SPECS[7, 0][Command.WRITE_MASK].request.fixed_bytes == 8


def test_a_turn_behind_a_mask_is_a_turn_again() -> None:
    with remote(NumpyDevice()) as far:
        buffer = far.alloc(ROOM)
        handle = far.prepare(sum_program(buffer))
        answers = []
        for recipe in (MIXED, None, None):
            if recipe is not None:
                far.write_mask(buffer, 512, recipe)
            for at in (0, 128):
                far.write(buffer, at, np.full(4, 2.5, np.float32).data.cast("B"))
            far.run(handle)
            answers.append(bytes(far.read(buffer, 256, 16).result(WAIT_S)))
        counted = far.link.dispatcher.stats().commands
        assert answers == [np.full(4, 5, np.float32).tobytes()] * 3
        assert (counted["WRITE_MASK"], counted["GRAPH_RUN"], counted["TAKE_TURN"]) == (1, 1, 2)
        assert bytes(far.read(buffer, 512, MIXED.n_bytes).result(WAIT_S)) == MIXED.array.tobytes()


def test_a_mask_between_a_run_and_a_read_comes_between_them() -> None:
    """What is read then is no longer what the run left: it is no turn."""
    with remote(NumpyDevice()) as far:
        buffer = far.alloc(ROOM)
        far.run(far.prepare(sum_program(buffer)))
        far.write_mask(buffer, 0, MIXED)
        assert bytes(far.read(buffer, 256, 16).result(WAIT_S)) == MIXED.array.tobytes()[256:272]
        assert far.link.dispatcher.stats().commands.get("TAKE_TURN", 0) == 0
