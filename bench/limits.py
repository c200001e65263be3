"""What the machine can do at best, measured by a small program that is compiled for it: `python -m bench.limits`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """Of some threads together: bytes read, bytes read plus written by copies, products of bytes; all per ns."""

    read_gb_s: float
    copy_gb_s: float
    gmac_s: float


def measure(threads: list[int]) -> dict[int, Limits]:
    """Takes about five seconds and 256 MiB per thread. Needs a C++ compiler."""
    compiler = next((found for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name
                     and (found := shutil.which(name))), None)  # fmt: skip
    if compiler is None:
        raise SystemExit("bench.limits needs a C++ compiler; install g++ or name one in CXX")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        source = Path(__file__).with_name("limits.cpp")
        flags = ["-O3", "-march=native", "-std=c++20", "-pthread", "-w"]  # gcc 12 warns of its own intrinsics
        subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
        limits: dict[int, Limits] = {}
        for n in threads:
            answer = subprocess.run([str(program), str(n)], check=True, capture_output=True, text=True).stdout
            limits[n] = Limits(*map(float, answer.split()))
        return limits


if __name__ == "__main__":
    for n_threads, at_best in measure([1, 2]).items():
        print(n_threads, at_best)
