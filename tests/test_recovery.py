"""What is said while a lost worker is waited for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.engine.gguf.reader import GGUFFile
from app.errors import AccessDenied, DeviceLost
from app.recovery import Recovery
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.stack import Stack


class NoPause:
    """A source of chance that never makes anybody wait."""

    def uniform(self, least: float, most: float) -> float:
        return least


def test_each_new_reason_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gguf = GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama()))
    stack = Stack(gguf, [NumpyDevice("CPU")])
    away = DeviceLost("far", "connection refused", reached=False)
    errors: list[Exception] = [away, away, AccessDenied("far", "another token"), away]

    heard: list[str] = []

    def reopen(lost: Sequence[Device]) -> list[Device]:
        if errors:
            raise errors.pop(0)
        return []

    with caplog.at_level(logging.INFO):
        recovery = Recovery(gguf, reopen, rng=NoPause())  # type: ignore[arg-type]
        assert recovery(stack.executor, DeviceLost("far", "cut"), heard.append) is stack.executor
    assert [("refused" in text, "token" in text) for text in heard] == [(True, False)] * 2 + [
        (False, True),
        (True, False),
    ]
    assert not any("device far" in text for text in heard)  # who hears of it knows which device it is about
    told = [record.getMessage() for record in caplog.records if "not back yet" in record.getMessage()]
    assert [("refused" in text, "token" in text) for text in told] == [(True, False), (False, True), (True, False)]
    stack.close()
