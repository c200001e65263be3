"""A worker's session fed with any bytes, in one thread and without a socket, and seeds that reach deep into it.

`python -m tests.rpc.fuzz_worker SECONDS FOLDER` hunts with coverage guidance (it needs the package atheris), from the
seeds, the corpus beside this file, and what earlier hunts left in FOLDER; what reaches new code is put there. The
smallest of what reached far is the corpus: every test run goes through it.
"""

from __future__ import annotations

import functools
import logging
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType, GluOp, Op, RopeMode, TensorFlag, UnaryOp
from app.engine.mask import CellRun, MaskRecipe, MaskRows
from app.engine.program import Buffer, PlacedTensor, Program
from app.engine.rows import WHOLE, RowSelection, RowWish
from app.errors import InternalError
from app.rpc import messages as m
from app.rpc.lower import Address, encode_graph
from app.rpc.protocol import RequestParser, encode
from app.rpc.session import Session
from app.rpc.token import Token
from app.rpc.transfers import BATCH_ITEM
from app.rpc.wire import region
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.programs import placed

VERSION = (7, 0)
MEMORY_BYTES = 1 << 20
CORPUS = Path(__file__).parent / "corpus"

#: The first buffer of every session, as a worker with deterministic addresses gives it.
HANDLE, BASE = 0x1000, 0x1000_0000

MASK = MaskRecipe(4, 64, 3, (MaskRows(0, 2, (CellRun(0, 5), CellRun(8, 2))), MaskRows(2, 1, (CellRun(9, 1),))))
ROWS = RowSelection(16, (RowWish(3, True), WHOLE))


class Script:
    """A socket of a client that says its bytes in small pieces and leaves; it forgets what it is told."""

    def __init__(self, data: bytes, piece_bytes: int = 1 << 16) -> None:
        self._data = memoryview(data)
        self._piece_bytes = piece_bytes
        self.answered_bytes = 0

    def recv_into(self, space: memoryview, n_bytes: int = 0, flags: int = 0) -> int:
        del n_bytes, flags
        n = min(len(space), len(self._data), self._piece_bytes)
        space[:n] = self._data[:n]
        self._data = self._data[n:]
        return n

    def recvmsg_into(
        self, spaces: Sequence[memoryview], ancillary_bytes: int = 0, flags: int = 0
    ) -> tuple[int, list[object], int, None]:
        del ancillary_bytes, flags
        received = 0
        for space in spaces:
            n = self.recv_into(space)
            received += n
            if n < len(space):
                break
        return received, [], 0, None

    def recv(self, n: int) -> bytes:
        taken, self._data = bytes(self._data[:n]), self._data[n:]
        return taken

    def sendmsg(self, buffers: tuple[bytes, ...]) -> int:
        sent = sum(map(len, buffers))
        self.answered_bytes += sent
        return sent

    def sendall(self, data: bytes) -> None:
        self.answered_bytes += len(data)

    def shutdown(self, how: int) -> None:
        if how != socket.SHUT_WR:
            self._data = self._data[:0]

    def setsockopt(self, *option: object) -> None: ...
    def settimeout(self, timeout_s: float | None) -> None: ...
    def close(self) -> None: ...


class Bugs(logging.Handler):
    """Collects what a worker logs with a traceback: it does so for its own bugs alone."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(record.exc_info[1])


@functools.cache
def device() -> NumpyDevice:
    """Shared by all sessions; whoever has had one closes it."""
    return NumpyDevice("CPU", 1, MEMORY_BYTES)


def one_input(data: bytes, piece_bytes: int = 1 << 16, token: Token | None = None) -> Script:
    """One session of a client that says HELLO and then `data`. Raises what the worker would call its own bug.

    With a token the client is a stranger, whatever it says.
    """
    bugs = Bugs()
    logger = logging.getLogger("app.rpc")
    logger.addHandler(bugs)
    worker = Worker([device()], WorkerSettings(max_message_bytes=1 << 20, token=token))
    script = Script(encode(m.Hello(), VERSION) + data, piece_bytes)
    try:
        sock: Any = script
        Session(worker, sock, "fuzz", RequestParser(VERSION, worker.settings.max_message_bytes)).run()
    finally:
        logger.removeHandler(bugs)
        worker.close()
    if bugs.found:
        raise bugs.found[0]
    left = MEMORY_BYTES - device().memory().free_bytes
    if left:
        raise InternalError(f"{left} bytes were not freed")
    return script


# -- seeds ----------------------------------------------------------------------------------------------------------


class Recorder:
    """Says what a sensible client would say about one buffer."""

    def __init__(self) -> None:
        self.buffer = Buffer("far", 1 << 16)
        self._said = bytearray(encode(m.AllocBuffer(0, 1 << 16), VERSION))
        self.say(m.BufferGetBase(HANDLE))
        self.say(m.BufferClear(HANDLE, 0))

    def say(self, request: Any, tail: bytes | bytearray | memoryview = b"") -> None:
        self._said += encode(request, VERSION, len(tail)) + bytes(tail)

    def set(self, offset: int, values: np.ndarray[Any, Any]) -> None:
        data = values.tobytes()
        self.say(m.SetTensor(region(HANDLE, BASE + offset, len(data)), 0, 0), data)

    def compute(self, *tensors: PlacedTensor, nodes: tuple[int, ...] | None = None) -> None:
        chosen = nodes or tuple(i for i, tensor in enumerate(tensors) if tensor.op != Op.NONE)
        program = Program("seed", tensors, chosen)
        graph = encode_graph(program, lambda buffer: Address(HANDLE, BASE), "far")
        self.say(m.GraphCompute(0, memoryview(graph)), graph)
        self.say(m.GraphRecompute(0))

    def end(self) -> bytes:
        self.say(m.GetTensor(region(HANDLE, BASE, 64), 0, 64))
        return bytes(self._said)


RUN = TensorFlag.COMPUTE
F32, F16, I32, I64, Q8_0 = GGMLType.F32, GGMLType.F16, GGMLType.I32, GGMLType.I64, GGMLType.Q8_0


def seeds() -> Iterator[bytes]:
    """Whole conversations: every command, and graphs of every kind of op."""
    yield _every_command()
    for graph in _GRAPHS:
        recorder = Recorder()
        recorder.set(0, np.linspace(-1, 1, 1024, dtype=np.float32))
        recorder.set(32768, np.array([0, 1, 2, 3], np.int32))
        recorder.set(33024, np.array([0, 1, 2, 3], np.int64))
        graph(recorder)
        yield recorder.end()


def _every_command() -> bytes:
    recorder = Recorder()
    whole = region(HANDLE, BASE, 256)
    for request, tail in (
        (m.DeviceCount(), b""),
        (m.GetAlignment(0), b""),
        (m.GetMaxSize(0), b""),
        (m.GetDeviceMemory(0), b""),
        (m.SetTensor(whole, 1, 8), bytes(100)),
        (m.SetTensorHash(whole, 0, 7), b""),
        (m.GetTensor(whole, 8, 100), b""),
        (m.CopyTensor(whole, region(HANDLE, BASE + 512, 256)), b""),
        (m.InitTensor(whole), b""),
        (m.GetAllocSize(0, whole, (whole,) + (region(0, 0, 0),) * 9), b""),
        (m.MemsetTensor(whole, 1, 2, 3), b""),
        (m.Describe(), b""),
        (m.WriteBatch(memoryview(b"")), BATCH_ITEM.pack(BASE, 4) + b"abcd" + BATCH_ITEM.pack(BASE + 9, 2) + b"xy"),
        (m.WriteMask(BASE + 1024, memoryview(b"")), MASK.packed),
        (m.ReadRegion(BASE, 16), b""),
        (m.ReadRows(BASE, 16, memoryview(b"")), ROWS.packed),
        (m.Ping(1), b""),
        (m.AuthChallenge(bytes(32)), b""),
        (m.PushAccept(0), b""),
        (m.PushTake(0, 1, BASE, 16), b""),
        (m.PushConnect(0, bytes(32), memoryview(b"")), b"127.0.0.1:0"),
    ):
        recorder.say(request, tail)
    tensors = (placed(recorder.buffer, 0), placed(recorder.buffer, 64, op=Op.ADD, src=(0, 0), flags=RUN))
    graph = encode_graph(Program("s", tensors, (1,)), lambda buffer: Address(HANDLE, BASE), "far")
    recorder.say(m.GraphStore(0, 5, memoryview(graph)), graph)
    recorder.say(m.GraphRun(0, 5))
    wishes = RowSelection(16, (RowWish(2, True),)).packed
    turn = wishes + BATCH_ITEM.pack(BASE, 4) + b"abcd"
    recorder.say(m.TakeTurn(0, 5, BASE + 64, 16, len(wishes), memoryview(b"")), turn)
    recorder.say(m.GraphDrop(0, 5))
    recorder.say(m.AllocBuffer(0, 4096))
    recorder.say(m.FreeBuffer(2 * HANDLE))
    return recorder.end()


def _floats(*values: float) -> tuple[int, ...]:
    return struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values))


def _elementwise(r: Recorder) -> None:
    b, matrix, row = r.buffer, (32, 4, 1, 1), (32, 1, 1, 1)
    r.compute(
        placed(b, 0, ne=matrix),
        placed(b, 512, ne=row),
        placed(b, 1024, ne=matrix, op=Op.MUL, src=(0, 1), flags=RUN),
        placed(b, 1536, ne=matrix, op=Op.RMS_NORM, params=_floats(1e-5), src=(2,), flags=RUN),
        placed(b, 2048, ne=matrix, op=Op.SCALE, params=_floats(2.0, 0.5), src=(3,), flags=RUN),
        placed(b, 2560, ne=matrix, op=Op.UNARY, params=(UnaryOp.SILU,), src=(4,), flags=RUN),
        placed(b, 3072, ne=matrix, op=Op.GLU, params=(GluOp.SWIGLU,), src=(4, 5), flags=RUN),
        placed(b, 3584, ne=(16, 4, 1, 1), op=Op.GLU, params=(GluOp.GEGLU, 1), src=(4,), flags=RUN),
        placed(b, 4096, ne=matrix, op=Op.CLAMP, params=_floats(-0.5, 0.5), src=(4,), flags=RUN),
    )


def _matrices(r: Recorder) -> None:
    b = r.buffer
    r.compute(
        placed(b, 0, ne=(32, 8, 1, 1)),
        placed(b, 1024, ne=(32, 3, 1, 1)),
        placed(b, 2048, ne=(8, 3, 1, 1), op=Op.MUL_MAT, src=(0, 1), flags=RUN),
        placed(b, 8192, type_=Q8_0, ne=(32, 8, 1, 1)),
        placed(b, 4096, ne=(8, 3, 1, 1), op=Op.MUL_MAT, src=(3, 1), flags=RUN),
        placed(b, 12288, ne=(32, 4, 4, 1)),
        placed(b, 32768, type_=I32, ne=(2, 3, 1, 1), name="experts"),
        placed(b, 1024, ne=(32, 1, 3, 1)),
        placed(b, 5120, ne=(4, 2, 3, 1), op=Op.MUL_MAT_ID, src=(5, 7, 6), flags=RUN),
    )


def _rows(r: Recorder) -> None:
    b = r.buffer
    r.compute(
        placed(b, 0, ne=(32, 4, 1, 1)),
        placed(b, 32768, type_=I32, ne=(3, 1, 1, 1)),
        placed(b, 1024, ne=(32, 3, 1, 1), op=Op.GET_ROWS, src=(0, 1), flags=RUN),
        placed(b, 33024, type_=I64, ne=(3, 1, 1, 1)),
        placed(b, 2048, type_=F16, ne=(32, 4, 1, 1), name="cache"),
        placed(b, 2048, type_=F16, ne=(32, 4, 1, 1), op=Op.SET_ROWS, src=(2, 3, 4), view=(4, 0), flags=RUN),
        placed(b, 4096, type_=I32, ne=(32, 3, 1, 1), op=Op.ARGSORT, params=(1,), src=(2,), flags=RUN),
        placed(b, 5120, ne=(1, 3, 1, 1), op=Op.SUM_ROWS, src=(2,), flags=RUN),
    )


def _attention(r: Recorder) -> None:
    b = r.buffer
    r.compute(
        placed(b, 0, ne=(32, 2, 4, 1), name="q"),
        placed(b, 0, ne=(32, 4, 2, 1), nb=(4, 256, 128, 1024), op=Op.PERMUTE, src=(0,), view=(0, 0)),
        placed(b, 4096, type_=F16, ne=(32, 64, 1, 1), name="k"),
        placed(b, 12288, type_=F16, ne=(32, 64, 1, 1), name="v"),
        placed(b, 20480, type_=F16, ne=(64, 4, 1, 1), name="mask"),
        placed(b, 24576, ne=(32, 2, 4, 1), op=Op.FLASH_ATTN_EXT, params=_floats(0.17), src=(1, 2, 3, 4), flags=RUN),
        placed(b, 28672, ne=(64, 4, 1, 1), name="scores"),
        placed(b, 28672, ne=(64, 4, 1, 1), op=Op.SOFT_MAX, params=_floats(1.0), src=(6, 4), view=(6, 0), flags=RUN),
    )


def _positions(r: Recorder) -> None:
    b = r.buffer
    for mode in (RopeMode.NORMAL, RopeMode.NEOX):
        params = (0, 32, mode, 0, 4096, *_floats(10000.0, 1.0, 0.0, 1.0, 32.0, 1.0))
        r.compute(
            placed(b, 0, ne=(32, 2, 4, 1)),
            placed(b, 32768, type_=I32, ne=(4, 1, 1, 1)),
            placed(b, 2048, ne=(32, 2, 4, 1), op=Op.ROPE, params=params, src=(0, 1), flags=RUN),
        )


def _moves(r: Recorder) -> None:
    b = r.buffer
    r.compute(
        placed(b, 0, ne=(32, 4, 1, 1)),
        placed(b, 0, ne=(4, 32, 1, 1), nb=(128, 4, 512, 512), op=Op.TRANSPOSE, src=(0,), view=(0, 0)),
        placed(b, 1024, ne=(4, 32, 1, 1), op=Op.CONT, src=(1,), flags=RUN),
        placed(b, 2048, type_=F16, ne=(32, 4, 1, 1), op=Op.CPY, src=(0, 3), flags=RUN),
        placed(b, 3072, ne=(32, 8, 1, 1), op=Op.CONCAT, params=(1,), src=(0, 0), flags=RUN),
        placed(b, 5120, ne=(64, 4, 1, 1), op=Op.REPEAT, src=(0,), flags=RUN),
        placed(b, 8192, ne=(40, 4, 1, 1), op=Op.PAD, params=(0, 8), src=(0,), flags=RUN),
    )


def _recurrent(r: Recorder) -> None:
    b = r.buffer
    r.compute(
        placed(b, 0, ne=(7, 16, 1, 1), name="conv input"),
        placed(b, 1024, ne=(4, 16, 1, 1), name="conv weight"),
        placed(b, 2048, ne=(16, 4, 1, 1), op=Op.SSM_CONV, src=(0, 1), flags=RUN),
    )


_GRAPHS: tuple[Callable[[Recorder], None], ...] = (
    _elementwise,
    _matrices,
    _rows,
    _attention,
    _positions,
    _moves,
    _recurrent,
)


def main(seconds: str, folder: str) -> None:
    import atheris

    logging.getLogger("app").setLevel(logging.ERROR)
    corpus = Path(folder)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    for name in [name for name in sys.modules if name.startswith(("app.rpc", "app.engine.opcheck"))]:
        _instrument(atheris, sys.modules[name])
    limits = ["-max_len=16384", "-rss_limit_mb=2048", "-timeout=20", "-len_control=0"]
    limits += [f"-max_total_time={seconds}", f"-artifact_prefix={corpus.parent}/"]
    atheris.Setup([sys.argv[0], *limits, str(corpus), str(CORPUS)], one_input)
    atheris.Fuzz()


def _instrument(atheris: Any, module: Any) -> None:
    """Make every function of a module report its branches."""
    for owner in (module, *[value for value in vars(module).values() if isinstance(value, type)]):
        for name, value in list(vars(owner).items()):
            if callable(value) and getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__code__"):
                setattr(owner, name, atheris.instrument_func(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
