"""How tests of the contract drive a device. No sleeps: gates are futures that the test resolves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from app.engine.device import Device, Handle, Payload
from app.engine.ggml import Op
from app.engine.program import Buffer
from tests.contract.cases import F32, CaseBuilder, Placed, place

TIMEOUT_S = 20
SIZE = 256


def get(device: Device, buffer: Buffer, offset: int = 0, size: int | None = None) -> bytes:
    return bytes(device.read(buffer, offset, buffer.size_bytes - offset if size is None else size).result(TIMEOUT_S))


def put(device: Device, buffer: Buffer, data: bytes, offset: int = 0) -> None:
    device.write(buffer, offset, data).result(TIMEOUT_S)


def gate(device: Device, buffer: Buffer, offset: int = 0, size: int = 1) -> Future[Payload]:
    """Block the device's lane until the returned future is given `size` bytes."""
    payload: Future[Payload] = Future()
    device.write(buffer, offset, payload, size_bytes=size)
    return payload


def fails(error: type[Exception], call: Callable[[], Any]) -> None:
    """The call fails, at once or by its future."""
    with pytest.raises(error):
        result = call()
        if isinstance(result, Future):
            result.result(TIMEOUT_S)


def doubling(device: Device, n: int = 8) -> tuple[Placed, Handle, int, int]:
    """A program that writes 2 * x: its place, its handle, and the offsets of x and of the result."""
    case = CaseBuilder("doubling")
    x = case.leaf(F32, np.arange(n))
    out = case.node(Op.SCALE, F32, (n,), (x,), (2.0, 0.0))
    placed = place(case, device)
    return placed, device.prepare(placed.program), placed.offsets[id(x)], placed.offsets[id(out)]


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()
