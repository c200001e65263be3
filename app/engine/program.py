"""Programs: what a device is asked to prepare and run.

A program is a graph whose tensors have places: every tensor that owns memory stands at an offset of a buffer of the
device that will run it. It is pure data and the meeting point of everything below the plan: `plan` makes programs,
local devices run them, `RpcDevice` writes them to the wire and a worker reads them back from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.ggml import VIEW_OPS, GGMLType, Op, Shape, TensorFlag, tensor_bytes

_COMPUTE = int(TensorFlag.COMPUTE)  # a plain number: flags are looked at some ten thousand times per program


class Buffer:
    """A piece of one device's memory. Made by `Device.alloc`, gone at `Device.free`; of no use to other devices."""

    __slots__ = ("__weakref__", "device_name", "size_bytes")

    def __init__(self, device_name: str, size_bytes: int) -> None:
        self.device_name = device_name
        self.size_bytes = size_bytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.size_bytes} bytes on {self.device_name}>"


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor of a program.

    `src` and `view_src` are indices into `Program.tensors` (-1: none). `offset` is where the tensor's first byte stands
    in `buffer`, for views already with `view_offs` added. `buffer` is None for a tensor that lives on another device
    and is only mentioned; no computed node may read it. `params` are up to 16 signed 32-bit words.
    """

    type: GGMLType
    ne: Shape
    nb: Shape
    op: Op
    params: tuple[int, ...]
    flags: TensorFlag
    src: tuple[int, ...]
    view_src: int
    view_offs: int
    buffer: Buffer | None
    offset: int
    name: str
    use_count: int = 0

    @property
    def n_bytes(self) -> int:
        return tensor_bytes(self.type, self.ne, self.nb)

    @property
    def n_elements(self) -> int:
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def is_computed(self) -> bool:
        """Whether an executor has work to do here; see the receiver's rules of the wire document."""
        return int(self.flags) & _COMPUTE != 0 and self.op not in VIEW_OPS and min(self.ne) > 0


@dataclass(frozen=True, slots=True)
class Program:
    """A placed graph. `nodes` index `tensors` in execution order; leaves are in `tensors` only.

    Later nodes may read bytes that earlier nodes wrote without an edge between them (caches), and the bytes of a dead
    value may be used again: executors keep list order, or prove by addresses that they may not.
    """

    name: str
    tensors: tuple[PlacedTensor, ...]
    nodes: tuple[int, ...]
