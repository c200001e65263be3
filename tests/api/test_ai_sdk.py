"""Vercel's AI SDK against a real server, in OpenAI's dialect and in Anthropic's. Fetches it from the package registry;
skips without Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.api.options import ApiOptions
from tests.api.live import WAIT_S, live_server
from tests.api.node.packages import packages_at
from tests.api.test_tools import HERMES, TWO
from tests.fakes.engine import FakeEngine

SCRIPT = Path(__file__).parent / "node" / "ai.mjs"
PACKAGES = ("ai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod")
ANSWER = "Hello from the fake engine."
CALLS = [["add", {"a": 2, "b": 3}], ["time", {"zone": "UTC"}]]

pytestmark = pytest.mark.slow


def reply(request: Any) -> str:
    """What the last turn asks for."""
    text = bytes(token for token in request.prompt if token < 256).decode("utf-8", "replace")
    if "tool\n" in text:
        return "It is 5."
    asked = text.rsplit("user\n", 1)[1]
    if "form" in asked:
        return '{"x": 3, "label": "a"}'
    thought = "<think>\nmm\n</think>\n\n" if "think" in asked else ""
    return thought + (TWO if "call" in asked else ANSWER)


def test_both_dialects(tmp_path: Path) -> None:
    packages_at(tmp_path, *PACKAGES)
    script = shutil.copy(SCRIPT, tmp_path)
    engine = FakeEngine(template=HERMES + "{# <think> #}", reply=reply)
    with live_server(engine, ApiOptions(api_keys=("sesame",))) as server:
        done = subprocess.run(["node", script, server.url], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert engine.idle(timeout_s=WAIT_S)
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == {"chat", "messages"}
    for told in results.values():
        assert told["whole"] == [ANSWER, "stop", len(ANSWER)]
        assert told["stream"] == [True, ANSWER, "stop", len(ANSWER)]
        assert told["thought"] == ["mm", ANSWER]
        assert told["agent"] == [[CALLS, []], "It is 5."]
        assert told["streamed"] == [[CALLS, []], "It is 5.", True]
        assert told["object"] == told["streamedObject"] == {"x": 3, "label": "a"}
        assert told["error"] == [400, False, True]
    forms = [request.constraint for request in engine.requests if request.constraint is not None]
    assert len(forms) == 4
