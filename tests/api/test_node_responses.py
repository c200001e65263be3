"""The openai package for Node asks for responses. Fetches it from the package registry; skips without Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.options import ApiOptions
from tests.api.live import LiveServer, live_server
from tests.api.node.packages import packages_at
from tests.api.responses import HERMES
from tests.api.test_openai_responses import ANSWER, PATCHED, reply
from tests.fakes.engine import FakeEngine

SCRIPT = Path(__file__).parent / "node" / "responses.mjs"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("node")
    packages_at(place, "openai")
    return place


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = FakeEngine(template=HERMES + "{# <think> #}", reply=reply)
    with live_server(engine, ApiOptions(api_keys=("sesame",))) as server:
        yield server


def test_node(package_dir: Path, server: LiveServer) -> None:
    script = shutil.copy(SCRIPT, package_dir)
    done = subprocess.run(["node", script, server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["whole"] == [ANSWER, "completed", len(ANSWER)] and results["stream"] == [ANSWER, True]
    assert results["items"] == ["reasoning", "message", "function_call"]
    assert results["call"] == ["add", {"a": 2}] and results["second"] == results["stored"] == "It is 5."
    assert results["patch"] == ["custom_tool_call", PATCHED]
    assert results["errors"] == [
        ["BadRequestError", 400, "previous_response_not_found", "previous_response_id"],
        ["BadRequestError", 400, "invalid_value", "temperature"],
    ]
