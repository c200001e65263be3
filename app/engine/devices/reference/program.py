"""From a checked program to a list of steps, by one table: op -> binder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from app.engine.devices.reference import (
    activations,
    attention,
    copies,
    elementwise,
    matmul,
    matrices,
    norms,
    recurrent,
    reductions,
    rope,
    rows,
    softmax,
    sorting,
)
from app.engine.devices.reference.node import Binder, Node, RunContext, Step
from app.engine.devices.reference.operand import Memory, Operand, bind
from app.engine.devices.reference.workers import Workers
from app.engine.ggml import Op
from app.engine.program import Buffer, PlacedTensor, Program

BINDERS: Mapping[Op, Binder] = {
    **elementwise.BINDERS,
    **activations.BINDERS,
    **reductions.BINDERS,
    **norms.BINDERS,
    **matmul.BINDERS,
    **attention.BINDERS,
    **softmax.BINDERS,
    **rope.BINDERS,
    **rows.BINDERS,
    **copies.BINDERS,
    **sorting.BINDERS,
    **matrices.BINDERS,
    **recurrent.BINDERS,
}

_NOWHERE: Memory = np.empty(0, np.uint8)  # empty tensors may have no buffer


def bind_program(
    program: Program, memory_of: Callable[[Buffer], Memory], workers: Workers
) -> tuple[list[tuple[PlacedTensor, Step]], RunContext]:
    """Steps for the computed nodes of a program that `check_program` has passed, in order, and what they share."""
    tensors = program.tensors
    computed = [tensors[index] for index in program.nodes if tensors[index].is_computed]
    context = RunContext(workers, tuple(computed))

    def operand(tensor: PlacedTensor) -> Operand:
        return bind(tensor, _NOWHERE if tensor.buffer is None else memory_of(tensor.buffer))

    steps = []
    for tensor in computed:
        sources = tuple(operand(tensors[index]) if index >= 0 else None for index in tensor.src)
        node = Node(operand(tensor), sources, context)
        steps.append((tensor, BINDERS[tensor.op](node)))
    return steps, context
