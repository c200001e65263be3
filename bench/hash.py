"""Speed of the content hash, alone and on two threads at once: `python -m bench.hash [MIB]`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from app.engine.kernels import hash as hashing

_REPEATS = 5


def best_gb_per_s(work: Callable[[], object], n_bytes: int) -> float:
    """The fastest of a few runs."""
    times_s = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - start_s)
    return n_bytes / min(times_s) / 1e9


def main() -> None:
    n_bytes = int(sys.argv[1] if len(sys.argv) > 1 else 256) << 20
    data = os.urandom(n_bytes)
    print(f"native module: {'yes' if hashing.NATIVE else 'no'}, {n_bytes >> 20} MiB")
    print(f"fnv1a64              {best_gb_per_s(lambda: hashing.fnv1a64(data), n_bytes):6.3f} GB/s")
    with ThreadPoolExecutor(2) as pool:
        two = best_gb_per_s(lambda: list(pool.map(hashing.fnv1a64, [data, data])), 2 * n_bytes)
    print(f"fnv1a64, two threads {two:6.3f} GB/s")
    small = data[: n_bytes // 16]
    print(f"fnv1a64_numpy        {best_gb_per_s(lambda: hashing.fnv1a64_numpy(small), len(small)):6.3f} GB/s")


if __name__ == "__main__":
    main()
