"""The openai package for Node against a real server. Fetches it from the package registry; skips without Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.options import ApiOptions
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.api.node.packages import packages_at
from tests.fakes.engine import FakeEngine

ANSWER = "Hello from the fake engine."
SCRIPT = Path(__file__).parent / "node" / "openai.mjs"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("node")
    packages_at(place, "openai")
    return place


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(), ApiOptions(api_keys=("sesame",))) as server:
        yield server


def test_node(package_dir: Path, server: LiveServer) -> None:
    script = shutil.copy(SCRIPT, package_dir)
    done = subprocess.run(["node", script, server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["whole"] == [ANSWER, "stop", len(ANSWER)]
    assert results["stream"] == [["", None], *([char, None] for char in ANSWER), [None, "stop"]]
    assert results["final"] == [ANSWER, ANSWER, 2 * len(ANSWER)]
    assert results["logprobs"] == [["H", 2], ["e", 2], ["l", 2]]
    assert results["embeddings"] == [8, 8] and results["models"] == ["fake"] and results["completion"] == "Hel"
    assert results["errors"] == [
        ["BadRequestError", 400, "context_length_exceeded", "messages"],
        ["BadRequestError", 400, "invalid_value", "temperature"],
    ]
    assert server.engine.idle(timeout_s=WAIT_S)
