"""Pushes from worker to worker: bytes, order, refusals, and every way in which a route can end."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from app.engine.handover import RELAYED, Boundaries, Pushed, choose, when_all
from app.engine.route import Route
from app.errors import DeviceError, DeviceLost, RouteLost
from app.rpc.connect import connect
from app.rpc.device import RpcDevice
from app.rpc.routes import RpcDeparture
from app.rpc.token import Token
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.adder import Adder
from tests.rpc.programs import sum_program
from tests.rpc.raw import RawClient
from tests.rpc.workers import QUICK, tcp_worker, wait_until

MIB = 1 << 20
WAIT_S = 30.0
SIZE = 8 * MIB
ACCEPT, CONNECT, ATTACH, PUSH, TAKE, DATA = 137, 138, 139, 140, 141, 142


@contextmanager
def workers(n: int, *settings: WorkerSettings) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        each = settings or (WorkerSettings(),) * n
        yield [stack.enter_context(tcp_worker(Adder(f"adder{i}"), settings=one)) for i, one in enumerate(each)]


@contextmanager
def devices(*served: Worker, token: Token | None = None) -> Iterator[list[RpcDevice]]:
    opened = [
        connect(f"127.0.0.1:{one.port}", first_index=i, timeouts=QUICK, token=token)[0] for i, one in enumerate(served)
    ]
    try:
        yield opened
    finally:
        for device in opened:
            device.close()


@pytest.fixture
def pair() -> Iterator[list[RpcDevice]]:
    with workers(2) as served, devices(*served) as opened:
        yield opened


def route(source: RpcDevice, target: RpcDevice) -> Route:
    found = source.open_route(target)
    assert found is not None
    return found


def adder_of(worker: Worker) -> Adder:
    device = worker.stations[0].device
    assert isinstance(device, Adder)
    return device


@pytest.mark.parametrize("size", [1, 4096, 300 << 10, SIZE])
def test_the_same_bytes_arrive(pair: list[RpcDevice], size: int) -> None:
    near, far = pair
    source, target = near.alloc(SIZE), far.alloc(SIZE)
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    near.write(source, SIZE - size, data.data)
    departure = route(near, far).push(source, SIZE - size, size)
    arrived = departure.arrive(target, 0)
    assert np.array_equal(np.frombuffer(far.read(target, 0, size).result(WAIT_S), np.uint8), data)
    departure.left.result(WAIT_S)
    arrived.result(WAIT_S)


def test_long_boundaries_go_in_pieces(pair: list[RpcDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.rpc.routes.PIECE_BYTES", 1000)
    near, far = pair
    source, target = near.alloc(4096), far.alloc(4096)
    data = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    near.write(source, 0, data.data)
    route(near, far).push(source, 0, 4096).arrive(target, 0).result(WAIT_S)
    assert bytes(far.read(target, 0, 4096).result(WAIT_S)) == data.tobytes()


@pytest.mark.parametrize("at", [256, 258], ids=["floats", "odd"])
def test_a_push_behind_a_run_takes_what_the_run_left(pair: list[RpcDevice], at: int) -> None:
    near, far = pair
    source, target = near.alloc(4096), far.alloc(4096)
    handle, way = near.prepare(sum_program(source)), route(near, far)
    for number in range(3):
        terms = np.zeros(64, np.float32)
        terms[:4], terms[32:36] = number, 1000
        near.write(source, 0, terms.data.cast("B"))
        near.run(handle)
        way.push(source, at, 8).arrive(target, 0)
        sums = np.full(4, 1000 + number, np.float32).tobytes()
        assert bytes(far.read(target, 0, 8).result(WAIT_S)) == sums[at - 256 :][:8]


def test_a_compute_waits_for_its_own_push_and_no_other() -> None:
    """Forty ubatches in flight over two stages, each with its own input."""
    with workers(2) as served, devices(*served) as (near, far):
        source, target = near.alloc(SIZE), far.alloc(SIZE)
        first, second = near.prepare(sum_program(source)), far.prepare(sum_program(target))
        way, results = route(near, far), []
        for number in range(40):
            terms = np.zeros(MIB // 4, np.float32)
            terms[:4], terms[32:36] = number, 1000
            near.write(source, 0, terms.data.cast("B"))
            near.run(first)
            departure = way.push(source, 256, MIB - 256)
            departure.arrive(target, 0)
            far.write(target, 128, np.full(4, 0.5, np.float32).data.cast("B"))
            far.run(second)
            results.append(far.read(target, 256, 16))
        for number, result in enumerate(results):
            assert np.frombuffer(result.result(WAIT_S), np.float32).tolist() == [1000.5 + number] * 4


def test_a_receiver_that_computes_takes_the_next_push_meanwhile() -> None:
    go_on = threading.Event()
    with workers(2) as served, devices(*served) as (near, far):
        source, target = near.alloc(SIZE), far.alloc(SIZE)
        handle, way = far.prepare(sum_program(target)), route(near, far)
        adder_of(served[1]).before_run = lambda: bool(go_on.wait(WAIT_S)) and None
        near.write(source, 0, np.full(SIZE, 7, np.uint8).data)
        way.push(source, 0, MIB).arrive(target, 0)
        far.run(handle)
        following = way.push(source, 0, SIZE)
        arrived = following.arrive(target, 0)
        following.left.result(WAIT_S)  # taken off the wire, although the device has not run yet
        assert not arrived.done() or not go_on.is_set()
        go_on.set()
        arrived.result(WAIT_S)
        assert bytes(far.read(target, 0, SIZE).result(WAIT_S)) == b"\x07" * SIZE


def test_pushes_in_both_directions_and_of_several_clients_do_not_wait_for_each_other() -> None:
    with workers(2) as served, devices(*served) as (a, b), devices(*reversed(served)) as (c, d):
        flows = [(a, b), (c, d)]
        ways = [route(near, far) for near, far in flows]
        buffers = [(near.alloc(SIZE), far.alloc(SIZE)) for near, far in flows]
        handles = [near.prepare(sum_program(source)) for (near, _), (source, _) in zip(flows, buffers, strict=True)]
        ends = []
        for number in range(12):
            for (near, far), way, (source, target), handle in zip(flows, ways, buffers, handles, strict=True):
                near.fill(source, 0, SIZE, number)
                near.run(handle)
                way.push(source, 0, SIZE).arrive(target, 0)
                ends.append((number, far.read(target, 4 * MIB, 64)))
        for number, end in ends:
            assert bytes(end.result(WAIT_S)) == bytes([number]) * 64


def test_over_three_workers_in_a_row() -> None:
    with workers(3) as served, devices(*served) as (a, b, c):
        buffers = [device.alloc(4 * MIB) for device in (a, b, c)]
        ways = [route(a, b), route(b, c)]
        a.fill(buffers[0], 0, 4 * MIB, 9)
        hops = [ways[0].push(buffers[0], 0, 4 * MIB)]
        hops[0].arrive(buffers[1], 0)
        hops.append(ways[1].push(buffers[1], 0, 4 * MIB))
        hops[1].arrive(buffers[2], 0)
        assert bytes(c.read(buffers[2], 0, 4 * MIB).result(WAIT_S)) == b"\x09" * (4 * MIB)


# -- no route ---------------------------------------------------------------------------------------------------------


def test_a_stock_worker_is_not_even_asked(caplog: pytest.LogCaptureFixture) -> None:
    with workers(2, WorkerSettings(), WorkerSettings(extensions=False)) as served, devices(*served) as (ours, stock):
        assert choose(ours, stock) is RELAYED and choose(stock, ours) is RELAYED
    assert "go through this server" not in caplog.text


def test_a_worker_that_cannot_be_reached_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with workers(2) as served, devices(*served) as (near, far):
        with socket.create_server(("127.0.0.1", 0)) as free:
            nobody = free.getsockname()[1]
        far.link.dispatcher.endpoint = f"127.0.0.1:{nobody}"
        ways = Boundaries()
        ways.connect([near, far])
        assert ways.way(0, [near, far]) is RELAYED
        far.memory()
        near.memory()
    assert (
        caplog.text.count("go through this server: ") == 1 and "could not be reached: Connection refused" in caplog.text
    )


def test_an_endpoint_that_leads_elsewhere_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    with workers(3) as served, devices(*served[:2]) as (near, far):
        far.link.dispatcher.endpoint = f"127.0.0.1:{served[2].port}"
        assert near.open_route(far) is None
    assert "ticket that is not, or no longer, good here" in caplog.text


def test_workers_show_each_other_the_token(caplog: pytest.LogCaptureFixture) -> None:
    token = Token(b"one secret for all of them")
    guarded, open_ = WorkerSettings(token=token), WorkerSettings()
    with workers(2, guarded, guarded) as served, devices(*served, token=token) as (near, far):
        source, target = near.alloc(64), far.alloc(64)
        near.fill(source, 0, 64, 5)
        route(near, far).push(source, 0, 64).arrive(target, 0)
        assert bytes(far.read(target, 0, 64).result(WAIT_S)) == b"\x05" * 64
    with workers(2, open_, guarded) as served, devices(*served, token=token) as (near, far):
        assert near.open_route(far) is None
    assert "PUSH_ATTACH came from a client that has not shown the token" in caplog.text


# -- endings ----------------------------------------------------------------------------------------------------------


def test_a_sender_that_is_gone_leaves_the_receiver_standing() -> None:
    go_on = threading.Event()
    with workers(1) as (last,), workers(1) as (first,), devices(first, last) as (near, far):
        adder_of(first).before_run = lambda: bool(go_on.wait(WAIT_S)) and None
        source, target = near.alloc(SIZE), far.alloc(SIZE)
        handle, way = near.prepare(sum_program(source)), route(near, far)
        near.write(source, 0, bytes(MIB))
        near.run(handle)
        departure = way.push(source, 0, SIZE)
        arrived, result = departure.arrive(target, 0), far.read(target, 0, 16)
        whole = when_all(result, [departure.left, arrived])
        assert isinstance(departure, RpcDeparture)
        departure.pieces[0].sent.result(WAIT_S)
        near.link.dispatcher.lose("cut by the test")
        with pytest.raises(DeviceLost, match="cut by the test"):
            departure.left.result(WAIT_S)
        with pytest.raises(DeviceLost, match="cut by the test"):  # the sender's loss, although the receiver tells of it
            arrived.result(WAIT_S)  # while the sender still computes: a push that left before the cut would arrive
        with pytest.raises(DeviceLost, match=f"127.0.0.1:{first.port}"):  # whichever of the two came first
            whole.result(WAIT_S)
        go_on.set()
        result.result(WAIT_S)  # whatever it holds: nobody waits for ever
        assert not way.is_open
        far.memory()


def test_a_receiver_that_is_gone_leaves_the_sender_standing() -> None:
    with workers(2) as served, devices(*served) as (near, far):
        source, target = near.alloc(SIZE), far.alloc(SIZE)
        way = route(near, far)
        way.push(source, 0, SIZE).arrive(target, 0).result(WAIT_S)
        served[1].close()
        wait_until(lambda: far.link.dispatcher.lost is not None)
        lefts = [way.push(source, 0, SIZE).left for _ in range(3)]
        with pytest.raises(DeviceLost) as caught:
            lefts[-1].result(WAIT_S)
        assert caught.value.endpoints == (far.link.endpoint,)
        near.memory()
        assert not way.is_open


def test_a_connection_that_fails_between_workers_that_stand_is_the_loss_of_no_worker() -> None:
    with workers(2) as served, devices(*served) as (near, far):
        source, target = near.alloc(64), far.alloc(64)
        way = route(near, far)
        for session in list(served[0]._sessions):
            for outlet in session.routes._outgoing.values():
                outlet.close()
        with pytest.raises(RouteLost, match="worker to worker has failed .*->") as caught:
            way.push(source, 0, 64).arrive(target, 0).result(WAIT_S)
        assert caught.value.endpoints == (near.link.endpoint, far.link.endpoint)
        near.memory()
        far.memory()


def test_what_failed_before_a_push_fails_the_receiver_too(pair: list[RpcDevice]) -> None:
    near, far = pair
    source, target = near.alloc(64), far.alloc(64)
    way = route(near, far)
    handle = near.prepare(sum_program(near.alloc(1024)))
    near.release(handle)
    near.run(handle)  # an error that the next question of this lane reports
    departure = way.push(source, 0, 64)
    arrived = departure.arrive(target, 0)
    for future in (departure.left, arrived, far.read(target, 0, 64)):
        with pytest.raises(Exception, match="it was released"):
            future.result(WAIT_S)
    near.fill(source, 0, 64, 3)
    way.push(source, 0, 64).arrive(target, 0).result(WAIT_S)  # the route itself is sound
    assert bytes(far.read(target, 0, 64).result(WAIT_S)) == b"\x03" * 64


def test_a_push_that_fails_late_leaves_what_waits_for_the_next_command_alone(pair: list[RpcDevice]) -> None:
    """It was queued when nothing waited; what has come since is not its to send."""
    near, far = pair
    source, target = near.alloc(64), far.alloc(64)
    way = route(near, far)
    late: Future[bytes] = Future()
    near.write(source, 0, late, size_bytes=64)
    departure = way.push(source, 0, 64)
    arrived = departure.arrive(target, 0)
    far.write(target, 0, b"\x05" * 64)
    late.set_exception(DeviceError("no bytes"))
    for future in (departure.left, arrived, far.read(target, 0, 64)):
        with pytest.raises(DeviceError, match="no bytes"):
            future.result(WAIT_S)
    assert bytes(far.read(target, 0, 64).result(WAIT_S)) == b"\x05" * 64
    assert far.link.dispatcher.stats().commands["SET_TENSOR"] == 1
    way.push(source, 0, 64).arrive(target, 0).result(WAIT_S)


def test_a_route_is_opened_again_after_a_failure(pair: list[RpcDevice]) -> None:
    near, far = pair
    source, target = near.alloc(64), far.alloc(64)
    ways = Boundaries()
    ways.connect([near, far])
    first = ways.way(0, [near, far])
    ways.connect([near, far])
    assert ways.way(0, [near, far]) is first and isinstance(first, Pushed)
    second = route(near, far)  # closes the first at both ends
    second.push(source, 0, 64).arrive(target, 0).result(WAIT_S)


def test_everything_is_freed_when_clients_leave_in_the_middle() -> None:
    with workers(2) as served:
        with devices(*served) as (near, far):
            target = far.alloc(SIZE)
            way = route(near, far)
            way.push(near.alloc(SIZE), 0, SIZE).arrive(target, 0)
            for device in (near, far):
                device.link.dispatcher.lose("the client is gone")
        wait_until(lambda: all(one.n_clients == 0 for one in served))
        assert [adder_of(one).used_bytes for one in served] == [0, 0]


# -- hostile peers ----------------------------------------------------------------------------------------------------


def accept(client: RawClient, route_: int = 0) -> bytes:
    return client.ask(ACCEPT, struct.pack("<I", route_))


def take(sequence: int, address: int, size: int, route_: int = 0) -> bytes:
    return struct.pack("<IQQQ", route_, sequence, address, size)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with workers(1) as (one,):
        yield one


def test_only_what_was_announced_is_taken(worker: Worker) -> None:
    with RawClient(worker.port) as client, RawClient(worker.port) as feed:
        _, base = client.alloc(64)
        assert feed.ask(ATTACH, accept(client)) == b"\1"
        client.tell(TAKE, take(7, base, 16))
        feed.tell(DATA, struct.pack("<Q", 7) + b"0123456789abcdef")
        assert client.answer() > bytes(4)
        assert client.ask(134, struct.pack("<QQ", base, 16)) == b"0123456789abcdef"


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<BQQ", DATA, 24, 8) + bytes(16),  # another sequence
        struct.pack("<BQQ", DATA, 8 + 17, 7) + bytes(17),  # another size
        struct.pack("<BQQ", DATA, 8, 7),  # no data
        struct.pack("<BQQ", DATA, (1 << 64) - 1, 7),  # all memory there is
        struct.pack("<BQ", 15, 0),  # another command
        struct.pack("<BQ", 200, 0),  # no command
        struct.pack("<BQQ", DATA, 24, 7) + bytes(3),  # and then it leaves
    ],
    ids=["sequence", "size", "empty", "huge", "command", "unknown", "cut off"],
)
def test_a_feed_that_breaks_the_rules_is_cut_and_the_client_is_told(worker: Worker, frame: bytes) -> None:
    with RawClient(worker.port) as client:
        _, base = client.alloc(64)
        feed = RawClient(worker.port)
        feed.ask(ATTACH, accept(client))
        feed.send(frame)
        if len(frame) == 20:
            feed.sock.close()
        assert client.ask(TAKE, take(7, base, 16)) == bytes(4)
        assert client.ask(TAKE, take(8, base, 16)) == bytes(4)
        assert client.ask(15) == struct.pack("<I", 1)  # the session lives on
        feed.sock.close()


@pytest.mark.parametrize("size", [0, (64 << 20) + 1, 1 << 63])
def test_pushes_have_a_size_that_makes_sense(worker: Worker, size: int, caplog: pytest.LogCaptureFixture) -> None:
    with RawClient(worker.port) as client:
        _, base = client.alloc(64)
        accept(client)
        client.tell(TAKE, take(1, base, size))
        wait_until(lambda: f"a push of {size} bytes, allowed are 1 to {64 << 20}" in caplog.text)


def test_pushes_land_in_the_client_s_own_buffers_alone(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with RawClient(worker.port) as client, RawClient(worker.port) as other:
        _, base = other.alloc(64)
        accept(client)
        client.tell(TAKE, take(1, base, 16))
        wait_until(lambda: "lie in no buffer of this client" in caplog.text)


def test_tickets_are_good_once_and_for_no_circle(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with RawClient(worker.port) as client, RawClient(worker.port) as first, RawClient(worker.port) as second:
        ticket = accept(client)
        first.ask(ATTACH, ticket)
        second.tell(ATTACH, ticket)
        wait_until(lambda: caplog.text.count("ticket that is not, or no longer, good") == 1)
        client.tell(ATTACH, accept(client))  # its own
        wait_until(lambda: "that takes pushes itself" in caplog.text)
    with RawClient(worker.port) as stranger:
        stranger.tell(DATA, struct.pack("<Q", 1))
        wait_until(lambda: "has not handed in a ticket" in caplog.text)


def test_routes_are_bounded_and_known(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with RawClient(worker.port) as client:
        for number in range(16):
            accept(client, number)
        accept(client, 3)  # again
        client.tell(ACCEPT, struct.pack("<I", 16))
        wait_until(lambda: "more than 16 routes" in caplog.text)
    for command in (PUSH, TAKE):
        with RawClient(worker.port) as client:
            client.tell(command, take(1, 0, 16, 5))
            wait_until(lambda: "route 5 for pushes was never opened" in caplog.text)
            caplog.clear()


def test_a_feed_without_a_client_ends(worker: Worker) -> None:
    with RawClient(worker.port) as feed:
        with RawClient(worker.port) as client:
            feed.ask(ATTACH, accept(client))
        assert feed.is_closed()
    wait_until(lambda: worker.n_clients == 0)


def test_a_client_that_leaves_while_it_waits_is_noticed(worker: Worker) -> None:
    with RawClient(worker.port) as feed:
        with RawClient(worker.port) as client:
            _, base = client.alloc(64)
            feed.ask(ATTACH, accept(client))
            client.tell(TAKE, take(1, base, 16))
        wait_until(lambda: worker.n_clients == 0)


def test_a_worker_closes_while_a_client_waits_for_a_push() -> None:
    with workers(1) as (one,), RawClient(one.port) as client, RawClient(one.port) as feed:
        _, base = client.alloc(64)
        feed.ask(ATTACH, accept(client))
        client.tell(TAKE, take(1, base, 16))
        one.close()
        assert one.n_clients == 0


def test_a_sender_tells_why_it_cannot_connect(worker: Worker) -> None:
    with RawClient(worker.port) as client:
        body = struct.pack("<I32s", 0, bytes(32)) + b"127.0.0.1:1"
        assert b"127.0.0.1:1" in client.ask(CONNECT, body)
        body = struct.pack("<I32s", 0, bytes(32)) + b"\xff\xfe no endpoint:0"
        assert b"is not host:port" in client.ask(CONNECT, body)
        for name in (b"\xff\xfe:1", b"a" * 200 + b":1"):
            assert b"cannot exist" in client.ask(CONNECT, struct.pack("<I32s", 0, bytes(32)) + name)
        body = struct.pack("<I32s", 0, bytes(32)) + f"127.0.0.1:{worker.port}".encode()
        assert b"ticket" in client.ask(CONNECT, body)
