"""One computed node with its operands, and what the nodes of a program share while it runs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from app.engine.devices.reference.operand import Operand
from app.engine.devices.reference.workers import Workers
from app.engine.program import PlacedTensor
from app.errors import InternalError

T = TypeVar("T")

#: What a prepared program is made of: no arguments, effects on the buffers only; what it returns means nothing.
Step = Callable[[], object]


@dataclass(slots=True)
class RunContext:
    """What the nodes of one program share.

    `written` are the results of the program. Values that depend only on tensors none of them overlaps (masks,
    positions) are computed once per run and forgotten at its end.
    """

    workers: Workers
    written: tuple[PlacedTensor, ...] = ()
    _values: dict[Hashable, Any] = field(default_factory=dict)

    def begin_run(self) -> None:
        self._values.clear()

    end_run = begin_run

    def once_per_run(self, what: str, inputs: Iterable[Operand], parameters: Hashable, make: Callable[[], T]) -> T:
        """`make()`, or what it returned for the same inputs and parameters earlier in this run."""
        key = (what, tuple(_place(operand.tensor) for operand in inputs), parameters)
        if key not in self._values:
            self._values[key] = make()
        value: T = self._values[key]
        return value

    def is_constant(self, operand: Operand) -> bool:
        """Whether no node of the program writes to an operand's bytes."""
        return not any(_overlap(operand.tensor, result) for result in self.written)


@dataclass(frozen=True, slots=True)
class Node:
    """A computed node: its result, its sources, its parameters."""

    out: Operand
    sources: tuple[Operand | None, ...]
    context: RunContext

    def src(self, i: int) -> Operand:
        """Source `i`, which the check of the program has made sure of."""
        source = self.sources[i]
        if source is None:
            raise InternalError(f"{self.out.tensor.op.name} {self.out.tensor.name} has no source {i}")
        return source

    def optional(self, i: int) -> Operand | None:
        return self.sources[i] if i < len(self.sources) else None

    def param(self, i: int) -> int:
        """Word `i` of the parameters; absent words are 0."""
        params = self.out.tensor.params
        return params[i] if i < len(params) else 0

    def param_f32(self, i: int) -> float:
        """Word `i` of the parameters as the float its bits are."""
        value: float = struct.unpack("<f", struct.pack("<i", self.param(i)))[0]
        return value

    def shared(
        self, what: str, inputs: Iterable[Operand | None], make: Callable[[], T], *parameters: Hashable
    ) -> Callable[[], T]:
        """A function that computes a value from some inputs, at most once per run when nothing overwrites them."""
        operands = tuple(operand for operand in inputs if operand is not None)
        if not all(map(self.context.is_constant, operands)):
            return make
        return lambda: self.context.once_per_run(what, operands, parameters, make)


def _place(tensor: PlacedTensor) -> Hashable:
    return (id(tensor.buffer), tensor.offset, tensor.type, tensor.ne, tensor.nb)


def _overlap(a: PlacedTensor, b: PlacedTensor) -> bool:
    same = a.buffer is b.buffer
    return same and a.offset < b.offset + b.n_bytes and b.offset < a.offset + a.n_bytes


#: Makes the step of one node. Called when a program is prepared: it may look at shapes, never at data.
Binder = Callable[[Node], Step]
