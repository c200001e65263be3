"""Loading over a worker: what is told of weights that it has already, and what is kept for the next start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app import fleet
from app.bootstrap import serving
from app.bootstrap.loading import Loading
from app.engine.devices.numpy import NumpyDevice
from app.engine.front import ServiceFront
from app.engine.service import Phase
from app.rpc import tensor_hashes
from app.rpc.worker import WorkerSettings
from app.settings import ServeSettings
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.rpc.workers import tcp_worker


def load(settings: ServeSettings) -> None:
    """Load as `serve` does, and stop."""
    devices = serving._open_devices(settings)
    try:
        placed = serving._place(settings, serving._open(settings), devices)
        front = ServiceFront(serving._info(settings, placed), placed.opened.tokenizer, placed.opened.template)
        loading = Loading(placed, front)
        loading.start("http://test", False)
        loading.join()
        assert front.status().phase is Phase.READY
        assert loading.finish() == 0
    finally:
        fleet.close_all(devices)


def test_a_second_start_hashes_and_sends_next_to_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama())
    keeps = WorkerSettings(cache_dir=tmp_path / "weights")
    with tcp_worker(NumpyDevice("CPU"), settings=keeps) as worker:
        settings = ServeSettings(model=str(model), ctx_size=512, rpc=(f"127.0.0.1:{worker.port}",))
        load(settings)
        assert "were there" not in capsys.readouterr().err
        monkeypatch.setattr(tensor_hashes, "fnv1a64", lambda data: pytest.fail("computed again"))
        load(settings)
        told = capsys.readouterr().err
        line = [line for line in told.splitlines() if line.startswith("loading:")][-1]
    assert re.search(r"loading: RPC0\[.*\] (.*) of \1 \(.* were there, .* sent, \d+ MB/s\)", line), line
