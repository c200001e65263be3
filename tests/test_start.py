"""How long it takes from the command to a server that answers."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.support import model_path

START_S = 2.0


def test_a_real_model_is_served_within_two_seconds_of_work() -> None:
    """Processor time, since other tests may keep this machine busy; the wall clock only has a generous limit.

    The best of three starts counts: what cold files and a slow minute of the host add is not the server's.
    """
    assert min(start_s() for _ in range(3)) < START_S


def start_s() -> float:
    """Processor seconds from the command to a server that answers, its end included."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "app", "serve", str(model_path()), "--port", str(port)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process)
        finally:
            process.terminate()
    assert process.returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline_s:
            pytest.fail("the server did not start")
        time.sleep(0.02)  # another process: there is nothing to wait on
