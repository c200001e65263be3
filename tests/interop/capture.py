"""Makes the vectors of `tests/rpc/vectors`: `python -m tests.interop.capture VERSION MODEL.gguf FOLDER`.

VERSION names the files; the peers are those that `tests.interop.stock` finds. A few requests of each kind that a stock
client sent to our worker are kept, one whole graph among them, and what a stock worker answered to our client.
"""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from app.engine.devices.numpy import NumpyDevice
from app.rpc.connect import connect
from app.rpc.wire import Command
from app.rpc.worker import WorkerSettings
from tests.interop.stock import run_stock_client, stock_worker
from tests.interop.tap import tapped
from tests.rpc.programs import sum_program
from tests.rpc.workers import tcp_worker

KEEP_PER_COMMAND = {Command.GRAPH_COMPUTE: 1}
KEEP_BYTES = 1 << 17


def requests(version: tuple[int, int], model: Path) -> bytes:
    """What a stock client says, thinned out."""
    with (
        tcp_worker(NumpyDevice(), settings=WorkerSettings(version=version)) as worker,
        tapped(worker.port, KEEP_BYTES) as tap,
    ):
        run_stock_client(model, [1, 2, 3], 3, [f"127.0.0.1:{tap.port}"])
        kept: list[bytes] = []
        seen: Counter[int] = Counter()
        for request in tap.requests:
            seen[request[0]] += 1
            large = len(request) > 4096 and request[0] != Command.GRAPH_COMPUTE
            if seen[request[0]] <= KEEP_PER_COMMAND.get(Command(request[0]), 3) and not large:
                kept.append(request)
        return b"".join(kept)


def answers() -> bytes:
    """What a stock worker says, to one question of each kind."""
    with stock_worker() as endpoint, tapped(int(endpoint.rpartition(":")[2]), KEEP_BYTES) as tap:
        (device,) = connect(f"127.0.0.1:{tap.port}")
        buffer = device.alloc(1024)
        device.write(buffer, 0, np.arange(4, dtype=np.float32))
        device.write(buffer, 128, np.arange(4, dtype=np.float32))
        device.run(device.prepare(sum_program(buffer)))
        device.read(buffer, 256, 16).result()
        device.copy(buffer, 0, buffer, 512, 64)
        device.memory()
        device.close()
        return bytes(tap.answers)


def main(version: str, model: str, folder: str) -> None:
    major, minor = version.split(".")
    for name, data in (("requests", requests((int(major), int(minor)), Path(model))), ("answers", answers())):
        (Path(folder) / f"{version}-{name}.bin.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
