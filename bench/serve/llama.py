"""Starts `bench.serve.llama_child` in the interpreter that has llama-cpp-python (`make interop`), and asks it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PYTHON = Path.home() / ".cache" / "tandem" / "interop-venv" / "bin" / "python"


@dataclass(slots=True)
class Llama:
    process: subprocess.Popen[str]
    version: str

    def run(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> float:
        """Seconds until all are answered."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "n_tokens": n_tokens}) + "\n")
        self.process.stdin.flush()
        return float(_answer(self.process)["seconds"])


@contextmanager
def llama(model: Path, n_threads: int, n_slots: int, n_ctx_slot: int) -> Iterator[Llama]:
    python = os.environ.get("LLAMA_PYTHON", str(_PYTHON))
    if not Path(python).exists():
        raise SystemExit(f"no llama-cpp-python at {python}: run `make interop`, or set LLAMA_PYTHON")
    child = str(Path(__file__).with_name("llama_child.py"))
    command = [python, child, str(model), str(n_threads), str(n_slots), str(n_ctx_slot)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Llama(process, _answer(process)["version"])
        assert process.stdin is not None
        process.stdin.close()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"llama.cpp ended with {process.wait()}; its errors are above")
    found: dict[str, Any] = json.loads(line)
    return found
