"""`make serve`'s processes, with small children in place of workers and server: order, endings, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app import local
from app.errors import TandemError
from app.local import ChildEnded, Grace, Worker
from tests.support import REPO

#: argv: a diary, a name, a port to listen on or 0, what to do: wait, deaf (to SIGTERM), or an exit code.
CHILD = """
import os, signal, socket, sys, time
diary, name, port, what = sys.argv[1:]
def note(text):
    with open(diary, "a") as file:
        file.write(f"{name} {text} {os.getpid()}\\n")
def end(number, frame):
    note("ends")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "deaf" else end)
signal.signal(signal.SIGINT, lambda *_: note("interrupted"))
note("starts")
if int(port):
    listener = socket.create_server(("127.0.0.1", int(port)))
if what.isdigit():
    sys.exit(int(what))
while True:
    time.sleep(60)
"""

#: Runs two waiting workers and a server from a process of its own, so that it can be signalled. argv as `child`.
DRIVER = """
import asyncio, json, sys
from app.local import Grace, Worker, run
workers, server, stop_s = json.loads(sys.argv[1])
sys.exit(asyncio.run(run([Worker(*w) for w in workers], server, Grace(stop_s=stop_s))))
"""


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    path = tmp_path / "diary"
    path.touch()
    return path


@pytest.fixture(autouse=True)
def nothing_left_behind(diary: Path) -> Iterator[None]:
    yield
    pids = {int(line.split()[-1]) for line in diary.read_text().splitlines()}
    for _ in range(500):
        if not (left := [pid for pid in pids if is_running(pid)]):
            return
        time.sleep(0.01)
    pytest.fail(f"processes left behind: {left}")


def is_running(pid: int) -> bool:
    """Whether the process is there and no mere zombie that its adopter has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def child(diary: Path, name: str, port: int, what: str) -> list[str]:
    return [sys.executable, "-c", CHILD, str(diary), name, str(port), what]


def workers(diary: Path, *what: str) -> list[Worker]:
    ports = local._free_ports(len(what))
    return [Worker(child(diary, f"w{i}", ports[i], what[i]), ports[i]) for i in range(len(what))]


def told(diary: Path) -> list[str]:
    """What the children wrote, without their ids."""
    return [line.rsplit(" ", 1)[0] for line in diary.read_text().splitlines()]


async def test_a_server_that_ends_by_itself_ends_the_workers(diary: Path) -> None:
    with pytest.raises(ChildEnded, match="the server ended with exit code 7") as caught:
        await local.run(workers(diary, "wait", "wait"), child(diary, "server", 0, "7"))
    assert caught.value.code == 7
    assert sorted(told(diary)[:2]) == ["w0 starts", "w1 starts"]
    assert told(diary)[2:] == ["server starts", "w1 ends", "w0 ends"]


async def test_a_worker_that_ends_before_it_listens_starts_no_server(diary: Path) -> None:
    quiet = Worker(child(diary, "w0", 0, "3"), local._free_ports(1)[0])
    with pytest.raises(ChildEnded, match="worker 0 ended with exit code 3"):
        await local.run([quiet, *workers(diary, "wait")], child(diary, "server", 0, "wait"))
    assert "server starts" not in told(diary)


async def test_a_worker_that_never_listens(diary: Path) -> None:
    quiet = Worker(child(diary, "w0", 0, "wait"), local._free_ports(1)[0])
    with pytest.raises(TandemError, match="did not begin to listen in time"):
        await local.run([quiet], child(diary, "server", 0, "wait"), Grace(start_s=0.5))


async def test_a_deaf_child_is_killed(diary: Path) -> None:
    with pytest.raises(ChildEnded):
        await local.run(workers(diary, "deaf"), child(diary, "server", 0, "1"), Grace(stop_s=0.1))
    assert told(diary) == ["w0 starts", "server starts"]


@contextmanager
def driver(diary: Path, server: str = "wait", stop_s: float = 30.0) -> Iterator[subprocess.Popen[str]]:
    """A process with two workers and a server that is up."""
    pair = [[worker.command, worker.port] for worker in workers(diary, "wait", "wait")]
    plan = json.dumps([pair, child(diary, "server", 0, server), stop_s])
    command = [sys.executable, "-c", DRIVER, plan]
    with subprocess.Popen(command, cwd=REPO, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: "server starts" in told(diary))
            yield process
        finally:
            process.kill()


def wait_until(done: Callable[[], bool]) -> None:
    for _ in range(3000):
        if done():
            return
        time.sleep(0.01)
    pytest.fail("waited in vain")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_first_and_is_success(diary: Path, number: signal.Signals) -> None:
    with driver(diary) as process:
        os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
        assert process.wait(30) == 0
    assert told(diary)[3:] == ["server ends", "w1 ends", "w0 ends"]


def test_a_second_signal_does_not_wait(diary: Path) -> None:
    with driver(diary, server="deaf", stop_s=600.0) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == "stopping; Ctrl-C again to stop at once\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert "server ends" not in told(diary)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children that their parent is gone")
def test_a_killed_parent_takes_its_children_along(diary: Path) -> None:
    with driver(diary) as process:
        process.kill()
        wait_until(lambda: sum(line.endswith("ends") for line in told(diary)) == 3)


def test_free_ports_differ() -> None:
    assert len(set(local._free_ports(20))) == 20
