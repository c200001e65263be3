"""What `bench.split` measures: engines over pinned workers of every kind, and llama.cpp over its own workers."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path

from app import fleet
from app.engine import probe
from app.engine.device import Device
from app.engine.devices.cpu import CpuDevice
from app.engine.engine import Engine
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import plan_stages
from app.engine.models import registry
from app.engine.placement import Tune
from app.engine.sizing import SizeWishes, choose_sizes
from app.engine.trace import Trace
from app.rpc.connect import connect
from app.rpc.worker import Worker, WorkerSettings
from bench.delay_proxy import DelayProxy
from bench.measured import Child
from bench.rpc import process
from tests.fakes.serving import open_engine

HERE = Path(__file__).parent
N_SLOTS, CTX_SIZE, UBATCH_TOKENS = 16, 16384, 512
START_S = 60.0


def pinned_worker(ports: Queue[int], core: int, extensions: bool) -> None:
    """A worker of one thread on one core."""
    os.sched_setaffinity(0, {core})
    devices = fleet.open_local(("CPU",), fleet.LocalOptions(threads=1))
    worker = Worker(devices, WorkerSettings(port=0, extensions=extensions))
    worker.start()
    ports.put(worker.port)
    worker.wait()


def stock_python() -> Path | None:
    """An interpreter with llama.cpp, where `make interop` has built one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = cache / "tandem" / "interop-venv" / "bin" / "python"
    return python if (python.parent / ".complete").is_file() else None


@contextmanager
def ggml_worker(python: Path, core: int) -> Iterator[int]:
    """llama.cpp's own RPC worker of one thread on one core; its port."""
    with socket.create_server(("127.0.0.1", 0)) as probed:
        port = probed.getsockname()[1]
    script = str(HERE.parent / "tests" / "interop" / "run_stock_worker.py")
    child = subprocess.Popen(
        [str(python), script, f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.sched_setaffinity(child.pid, {core})
    try:
        _wait_for(port)
        yield port
    finally:
        child.kill()
        child.wait()


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


@contextmanager
def llama_over(python: Path, model: str, n_workers: int) -> Iterator[Child]:
    """llama.cpp with all layers on so many of its own workers; what is computed here has one thread."""
    with ExitStack() as stack:
        ports = [stack.enter_context(ggml_worker(python, core)) for core in _cores(n_workers)]
        endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
        command = [str(python), str(HERE / "llama_child.py"), model, "1", "4096", endpoints]
        yield stack.enter_context(Child(command))


@dataclass(slots=True)
class Setup:
    """One engine, and the seconds and answers of each task in every round."""

    engine: Engine
    layers: list[int]
    #: Whether all kernels are, which give a row the same bits in ubatches of any size.
    is_ours: bool = True
    seconds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    n_ubatches: dict[str, float] = field(default_factory=dict)
    #: What the slowest stage took in the best round.
    slowest_stage_s: dict[str, float] = field(default_factory=dict)

    def best_s(self, task: str) -> float:
        return min(self.seconds[task])

    def stage_seconds(self) -> list[float]:
        """What each stage has computed for so far, as the control plane sees it."""
        counters = self.engine.counters()
        return [counters.get(f"stage_{number}_compute_seconds_total", 0.0) for number in range(len(self.layers))]


#: Kinds of places for layers. `ggml` is llama.cpp's own worker, `stock` ours without its extensions.
LOCAL, TANDEM, STOCK, GGML = "local", "tandem", "stock", "ggml"


@contextmanager
def setup(
    model: str,
    kinds: Sequence[str],
    *,
    link_s: float = 0.0,
    trace: Trace | None = None,
    first_core: int = 0,
    tune: Tune = Tune.AUTO,
) -> Iterator[Setup]:
    """An engine whose layers stand on places of these kinds, a core for each, split as `tandem serve` would."""
    with ExitStack() as stack:
        devices: list[Device] = []
        for number, (kind, core) in enumerate(zip(kinds, _cores(len(kinds), first_core), strict=True)):
            if kind == LOCAL:
                devices.append(CpuDevice("CPU", 1))
            else:
                devices += connect(f"127.0.0.1:{_worker_port(stack, kind, core, link_s)}", first_index=number)
            stack.callback(devices[-1].close)
        split = measured_split(model, devices, tune)
        engine = open_engine(
            Path(model), devices, ctx_size=CTX_SIZE, n_slots=N_SLOTS, n_ubatch=UBATCH_TOKENS, max_queue=64,
            max_in_flight=len(devices) + 1, tensor_split=split, trace=trace,
        )  # fmt: skip
        stack.callback(engine.close)
        if trace is not None:
            trace.stage_names = [device.name for device in devices]
        yield Setup(engine, [int(n) for n in split], GGML not in kinds)


def _worker_port(stack: ExitStack, kind: str, core: int, link_s: float) -> int:
    if kind == GGML:
        python = stock_python()
        assert python is not None
        port = stack.enter_context(ggml_worker(python, core))
    else:
        port = stack.enter_context(process(pinned_worker, core, kind == TANDEM))
    if link_s:
        proxy = DelayProxy(("127.0.0.1", port), link_s)
        stack.callback(proxy.close)
        port = proxy.port
    return port


def _cores(n: int, first: int = 0) -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    return [cores[(first + number) % len(cores)] for number in range(n)]


def measured_split(model: str, devices: Sequence[Device], tune: Tune) -> list[float]:
    """Layers for each device, as a start that measures them gives them out."""
    gguf = GGUFFile.open(Path(model))
    loaded = registry.load(gguf)
    wishes = SizeWishes(
        ctx_size=CTX_SIZE, n_slots=N_SLOTS, n_ubatch=UBATCH_TOKENS, max_queue=64, cache_prompts=True,
        key_type="f16", value_type="f16",
    )  # fmt: skip
    limits = choose_sizes(loaded, devices, wishes).limits
    speeds = probe.measure(loaded, devices, limits) if len(devices) > 1 else None
    stages = plan_stages(loaded, devices, limits, speeds=speeds, tune=tune)
    counts = {id(stage.device): stage.shape.last_layer - stage.shape.first_layer for stage in stages}
    return [float(counts.get(id(device), 0)) for device in devices]
