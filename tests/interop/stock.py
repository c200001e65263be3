"""Real peers: llama.cpp's RPC worker and client, out of a venv of their own that `make interop` builds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
START_S = 60.0
RUN_S = 600.0


def stock_python() -> Path:
    """The interpreter that has llama.cpp. Skips the test when there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = cache / "tandem" / "interop-venv" / "bin" / "python"
    if not (python.parent / ".complete").is_file():
        pytest.skip("no llama.cpp to talk to; run `make interop`")
    return python


@contextmanager
def stock_worker(*, n_devices: int = 1, cache_dir: Path | None = None) -> Iterator[str]:
    """A ggml RPC worker in a process of its own, on one thread; its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [str(stock_python()), str(HERE / "run_stock_worker.py"), endpoint, str(n_devices)]
    if cache_dir is not None:
        command.append(str(cache_dir))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(endpoint, process)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _wait_for(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    host, port = endpoint.split(":")
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the stock worker did not start"
            time.sleep(0.05)  # another process: there is nothing to wait on


def run_stock_client(
    model: Path, tokens: Sequence[int], n_tokens: int, endpoints: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """Greedy tokens of llama.cpp after a prompt, with its lead and its best logits at each step.

    With endpoints all layers stand on workers, otherwise on this machine's CPU.
    """
    wish = {"model": str(model), "tokens": list(tokens), "n_tokens": n_tokens, "endpoints": list(endpoints), **options}
    command = [str(stock_python()), str(HERE / "run_stock_client.py"), json.dumps(wish)]
    done = subprocess.run(command, capture_output=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:].decode(errors="replace")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
