"""Engines under measurement: children that hold one model each, do what they are told and answer with seconds.

Commands are lines `prompt N`, `decode N`, `fill N` (a context of N more tokens, however it is made) and `forget 0`; the
answer is the wall time and the CPU time of the child. One child works at a time, so engines measure in turn.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

_SETTLE_S = 0.1  # so that threads of the child before have gone to sleep


class Child:
    """One engine with one model and a fixed number of threads. A context manager: leaving it ends the process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready, _, self.description = self._line().partition(" ")
        if ready != "ready":
            raise RuntimeError(f"{' '.join(command)} said {ready!r} where it should be ready")

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait()}; its errors are above")
        return line

    def ask(self, command: str, n: int = 0) -> float:
        """Wall seconds that the child took."""
        time.sleep(_SETTLE_S)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {n}\n")
        self._process.stdin.flush()
        wall_s, _cpu_s = map(float, self._line().split())
        return wall_s

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
