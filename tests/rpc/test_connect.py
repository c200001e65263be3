"""Whom we talk to: versions, strangers, silence, odd figures. One line says what is wrong and where."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from app.engine.devices.numpy import NumpyDevice
from app.errors import ConfigError, DeviceError, DeviceLost, RemoteProtocolError, TandemError, VersionMismatch
from app.rpc.connect import connect
from app.rpc.endpoint import Timeouts, parse_endpoint, write_endpoint
from app.rpc.messages import FreeBuffer
from app.rpc.wire import Command
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.adder import Adder
from tests.rpc.fake_worker import FakeWorker, framed
from tests.rpc.workers import QUICK, connected, tcp_worker


@pytest.mark.parametrize("version", [(6, 0, 0), (6, 0, 9), (7, 0, 0), (7, 0, 9)])
def test_versions_we_speak(version: tuple[int, int, int]) -> None:
    with FakeWorker(version=version) as fake:
        (device,) = connect(fake.endpoint, timeouts=QUICK)
        assert device.caps.kernel_variant == "stock-" + ".".join(map(str, version))
        assert device.name == f"RPC0[{fake.endpoint}]"
        device.close()


@pytest.mark.parametrize("version", [(5, 1, 0), (6, 1, 0), (7, 1, 0), (8, 0, 0), (0, 0, 0)])
def test_versions_we_do_not_speak(version: tuple[int, int, int]) -> None:
    with FakeWorker(version=version) as fake:
        with pytest.raises(VersionMismatch) as caught:
            connect(fake.endpoint, timeouts=QUICK)
        message = str(caught.value)
        assert all(part in message for part in (fake.endpoint, ".".join(map(str, version)), "6.0 and 7.0"))
        assert "\n" not in message


@contextlib.contextmanager
def listener(says: bytes | None) -> Iterator[str]:
    """Accepts one connection, waits for its first bytes, says something and hangs up; None: stays silent."""
    server = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            sock.recv(100)
            if says is None:
                done.wait(20)
            else:
                sock.sendall(says)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        done.set()
        thread.join()
        server.close()


def test_an_http_server_is_no_worker() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as endpoint:
        with pytest.raises(RemoteProtocolError, match=f"{endpoint} is not an RPC worker.*3543824036068086856"):
            connect(endpoint, timeouts=QUICK)


def test_a_port_that_hangs_up() -> None:
    with listener(b"") as endpoint, pytest.raises(DeviceLost, match=f"{endpoint} could not be reached during HELLO"):
        connect(endpoint, timeouts=QUICK)


def test_a_silent_port() -> None:
    with listener(None) as endpoint, pytest.raises(DeviceLost, match=r"nothing answered within 0.3 s"):
        connect(endpoint, timeouts=Timeouts(hello_s=0.3))
    assert Timeouts().hello_s == 10.0


def test_a_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(DeviceLost, match=f"{endpoint} could not be reached: Connection refused; is a worker"):
        connect(endpoint, timeouts=QUICK)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host", ("host", 50052)),
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:70", ("::1", 70)),
        ("[::1]", ("::1", 50052)),
        ("::1", ("::1", 50052)),
    ],
)
def test_endpoints(text: str, address: tuple[str, int]) -> None:
    assert parse_endpoint(text) == address


@pytest.mark.parametrize("address", [("host", 1), ("10.0.0.1", 2), ("::1", 50052)])
def test_endpoints_are_written_as_they_are_read(address: tuple[str, int]) -> None:
    assert parse_endpoint(write_endpoint(*address)) == address


def test_an_endpoint_with_a_scheme_is_told_so() -> None:
    with pytest.raises(ConfigError, match="has a scheme; write host:port alone"):
        connect("http://127.0.0.1:51001")


@pytest.mark.parametrize("text", ["", ":", ":1", "host:", "host:0", "host:65536", "host:x", "tcp//host:-1"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        connect(text)


# -- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [0, 257, (1 << 32) - 1])
def test_a_number_of_devices_that_makes_no_sense(devices: int) -> None:
    with FakeWorker(devices=devices) as fake, pytest.raises(DeviceError, match=f"announces {devices} devices"):
        connect(fake.endpoint, timeouts=QUICK)


def test_the_devices_of_a_stock_worker_share_one_connection() -> None:
    with FakeWorker(devices=3) as fake:
        devices = connect(fake.endpoint, first_index=4, timeouts=QUICK)
        assert [device.name for device in devices] == [f"RPC{i}[{fake.endpoint}]" for i in (4, 5, 6)]
        assert len({device.link for device in devices}) == 1
        assert fake.commands().count("GET_ALIGNMENT") == 3
        buffer = devices[0].alloc(64)
        devices[0].close()
        assert FreeBuffer(buffer.address.remote_ptr) in fake.seen
        assert devices[2].memory().total_bytes == 8 << 30
        with pytest.raises(DeviceLost, match="the device was closed"):
            devices[0].memory()
        devices[1].close()
        devices[2].close()


def test_the_devices_of_a_tandem_worker_have_connections_of_their_own() -> None:
    with tcp_worker(NumpyDevice("a"), Adder("b")) as worker, connected(worker) as devices:
        assert len({device.link for device in devices}) == 2
        assert worker.n_clients == 3  # one per device, and the heartbeat
        assert [device.caps.kernel_variant for device in devices] == ["numpy", "adder-1"]
        assert devices[1].caps.description == "adds numbers"


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_an_alignment_that_makes_no_sense(alignment: int) -> None:
    answer = framed(struct.pack("<Q", alignment))
    with FakeWorker(override={Command.GET_ALIGNMENT: lambda _: answer}) as fake:
        with pytest.raises(RemoteProtocolError, match=f"an alignment of {alignment} bytes"):
            connect(fake.endpoint, timeouts=QUICK)


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"devices": [1]}', b'{"devices": [], "keeps_weights": 1}'])
def test_an_unreadable_description(text: bytes) -> None:
    with FakeWorker(pad=0x54, override={Command.DESCRIBE: lambda _: framed(text)}) as fake:
        with pytest.raises(RemoteProtocolError, match=f"worker {fake.endpoint} describes"):
            connect(fake.endpoint, timeouts=QUICK)


def test_every_answer_cut_short_is_an_error_and_no_hang() -> None:
    """Whatever the question after which a worker goes, `connect` says so and leaves nothing open."""
    for command in (Command.HELLO, Command.DEVICE_COUNT, Command.GET_ALIGNMENT, Command.GET_MAX_SIZE):
        for half in (None, b"\x08\0\0", framed(b"12345678")[:-2]):
            with FakeWorker(override={command: lambda _, half=half: half}) as fake:
                watcher = threading.Timer(0.2, fake.hang_up)
                watcher.start()
                with pytest.raises(TandemError):
                    connect(fake.endpoint, timeouts=QUICK)
                watcher.join()


# -- the worker's own door ----------------------------------------------------------------------------------------


def test_a_busy_port_is_said_in_one_line() -> None:
    with tcp_worker(Adder()) as worker:
        second = Worker([], WorkerSettings(port=worker.port))
        with pytest.raises(TandemError, match=f"cannot listen on 127.0.0.1:{worker.port}: .*choose another --port"):
            second.start()


def test_too_many_clients_are_turned_away_and_the_others_stay() -> None:
    with tcp_worker(Adder(), settings=WorkerSettings(max_clients=2)) as worker, connected(worker) as (device,):
        with pytest.raises(DeviceLost):
            connect(f"127.0.0.1:{worker.port}", timeouts=QUICK)
        assert device.memory().total_bytes == 1 << 30
