"""The check of a whole program: places and references first, then each computed node by its op's rule."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NoReturn

from app.engine.ggml import MAX_OP_PARAMS, MAX_SRC, TRAITS, Op
from app.engine.opcheck.node import NodeCheck, is_contiguous, is_same_place
from app.engine.opcheck.rules import RULES
from app.engine.program import PlacedTensor, Program
from app.errors import FormatError, UnsupportedOp

#: Ops whose result may be exactly the memory of one of their sources, in the same layout: they read an element, or a
#: row, before they write it.
IN_PLACE = frozenset(
    {
        Op.FILL, Op.SCALE, Op.ADD, Op.ADD_ID, Op.ADD1, Op.SUB, Op.MUL, Op.DIV, Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS,
        Op.UNARY, Op.LEAKY_RELU, Op.ROPE, Op.RMS_NORM, Op.NORM, Op.L2_NORM, Op.CLAMP, Op.SOFT_MAX, Op.ACC, Op.SET,
        Op.DUP, Op.CONT,
    }
)  # fmt: skip
#: Of some of them only for these sources; the rest is read again after the first element was written.
IN_PLACE_SOURCES = {
    Op.ADD_ID: frozenset({0}),
    Op.ACC: frozenset({0}),
    Op.SET: frozenset({0}),
    Op.ROPE: frozenset({0}),
    Op.SOFT_MAX: frozenset({0, 1}),
}
#: Sources whose values are places in memory. Not a byte between their first and last may belong to the result.
ID_SOURCES = {Op.GET_ROWS: 1, Op.SET_ROWS: 1, Op.ADD_ID: 2, Op.MUL_MAT_ID: 2, Op.SSM_SCAN: 6}
#: Ops that write through a source on purpose: the number is that source.
WRITES_THROUGH = {Op.CPY: 1, Op.SET_ROWS: 2}
#: Nodes found sound, apart from where they stand. The layers of a model are alike, so most of a program is known here.
_accepted: set[Hashable] = set()
_MAX_ACCEPTED = 4096
#: How often the elements of one view may cover its bytes (the windows of a convolution do); bounds the work of a peer.
MAX_OVERLAP = 16


def check_program(program: Program, device_name: str = "?") -> None:
    """Refuse a program that is malformed or that no local device can run.

    Raises FormatError for places and references that make no sense, UnsupportedOp for ops, types, shapes and strides.
    """
    sizes = [_check_place(program, index) for index in range(len(program.tensors))]
    position: dict[int, int] = {}
    for at, index in enumerate(program.nodes):
        if not 0 <= index < len(program.tensors):
            _malformed(program, f"node {at} is tensor {index}, there are {len(program.tensors)}")
        if index in position:
            _malformed(program, f"tensor {index} is listed as a node twice")
        position[index] = at
    for index in program.nodes:
        if program.tensors[index].is_computed:
            _check_node(program, index, position, sizes, device_name)


def _malformed(program: Program, reason: str) -> NoReturn:
    raise FormatError(f"program {program.name} is malformed: {reason}")


def _check_place(program: Program, index: int) -> int:
    """Check a tensor for itself; its bytes in all, also where it has no place here."""
    tensor = program.tensors[index]
    what = f"tensor {index} ({tensor.name})"
    if len(tensor.src) > MAX_SRC or len(tensor.params) > MAX_OP_PARAMS:
        _malformed(program, f"{what} has {len(tensor.src)} sources and {len(tensor.params)} parameters")
    if tensor.params and not (-(2**31) <= min(tensor.params) and max(tensor.params) < 2**31):
        _malformed(program, f"{what} has a parameter that is not a signed 32-bit word")
    references = (*tensor.src, tensor.view_src)
    if min(references) < -1 or max(references) >= len(program.tensors):
        wrong = next(reference for reference in references if not -1 <= reference < len(program.tensors))
        _malformed(program, f"{what} refers to tensor {wrong}, there are {len(program.tensors)}")
    if min(tensor.ne) < 0 or min(tensor.nb) < 0 or tensor.offset < 0 or tensor.view_offs < 0:
        _malformed(program, f"{what} has a negative extent, stride or offset")
    if tensor.ne[0] % TRAITS[tensor.type].block_elements:
        _malformed(program, f"{what} has rows of {tensor.ne[0]} elements, not a multiple of a {tensor.type.name} block")
    n_bytes = tensor.n_bytes
    if tensor.buffer is None:
        return n_bytes
    if tensor.offset + n_bytes > tensor.buffer.size_bytes:
        end = tensor.offset + n_bytes
        _malformed(program, f"{what} ends at byte {end} of a buffer of {tensor.buffer.size_bytes} bytes")
    if n_bytes > 0:
        _check_strides(program, tensor, n_bytes, what)
        if tensor.view_src >= 0:
            _check_view(program, tensor, n_bytes, what)
    return n_bytes


def _check_strides(program: Program, tensor: PlacedTensor, n_bytes: int, what: str) -> None:
    """Elements must start where their type allows, and may not cover the same bytes over and over."""
    traits = TRAITS[tensor.type]
    strides = [nb for n, nb in zip(tensor.ne[1:], tensor.nb[1:], strict=True) if n > 1]
    if traits.block_elements == 1:
        strides += [tensor.offset] + ([tensor.nb[0]] if tensor.ne[0] > 1 else [])
        if any(stride % traits.block_bytes for stride in strides):
            _malformed(program, f"{what} does not stand on multiples of its {traits.block_bytes}-byte elements")
    elif tensor.nb[0] != traits.block_bytes:
        _malformed(program, f"{what} has {tensor.type.name} blocks {tensor.nb[0]} bytes apart")
    covered = tensor.n_elements // traits.block_elements * traits.block_bytes
    if covered > MAX_OVERLAP * n_bytes:
        _malformed(program, f"{what} covers its {n_bytes} bytes {covered // n_bytes} times over")


def _check_view(program: Program, tensor: PlacedTensor, n_bytes: int, what: str) -> None:
    owner = program.tensors[tensor.view_src]
    if owner is tensor or owner.view_src >= 0:
        _malformed(program, f"{what} is a view of a tensor that does not own its memory")
    if owner.buffer is not tensor.buffer or tensor.offset != owner.offset + tensor.view_offs:
        _malformed(program, f"{what} does not lie where its owner ({owner.name}) and its view offset say")
    if tensor.view_offs + n_bytes > owner.n_bytes:
        _malformed(
            program,
            f"{what} spans bytes {tensor.view_offs} to {tensor.view_offs + n_bytes} "
            f"of its owner ({owner.name}), which has {owner.n_bytes}",
        )


def _check_node(program: Program, index: int, position: dict[int, int], sizes: Sequence[int], device_name: str) -> None:
    tensor = program.tensors[index]
    what = f"tensor {index} ({tensor.name})"
    if tensor.buffer is None:
        _malformed(program, f"{what} is computed but has no place here")
    sources = tuple(program.tensors[i] if i >= 0 else None for i in tensor.src)
    node = NodeCheck(device_name, tensor, sources)
    rule = RULES.get(tensor.op)
    if rule is None:
        raise UnsupportedOp(device_name, tensor.op.name, "no local device has a kernel for it")
    for i, (source, reference) in enumerate(zip(sources, tensor.src, strict=True)):
        if source is None:
            continue
        if reference == index:
            if tensor.op is not Op.CPY or i != 1:
                _malformed(program, f"{what} is its own source {i}")
        elif source.is_computed and position.get(reference, -1) > position[index]:
            _malformed(program, f"{what} reads {source.name}, which is computed after it")
        if min(source.ne) == 0:
            node.require(tensor.op in {Op.CONCAT, Op.ACC, Op.SET}, f"source {i} is empty")
        elif source.buffer is None:
            _malformed(program, f"{what} reads {source.name}, which has no place here")
    likeness = _likeness(tensor, sources)
    if tensor.op in WRITES_THROUGH or likeness not in _accepted:
        rule(node)
        node.require(_is_injective(tensor), "elements of the result overlap each other")
        if len(_accepted) >= _MAX_ACCEPTED:
            _accepted.clear()
        _accepted.add(likeness)
    _check_result(node, sizes[index], [sizes[i] if i >= 0 else 0 for i in tensor.src])


def _likeness(tensor: PlacedTensor, sources: Sequence[PlacedTensor | None]) -> Hashable:
    """All that a rule looks at, but for places, which only rules of ops that write through a source look at."""
    shapes = tuple([None if source is None else (source.type, source.ne, source.nb) for source in sources])
    return tensor.op, tensor.params, tensor.type, tensor.ne, tensor.nb, shapes


def _check_result(node: NodeCheck, n_bytes: int, source_bytes: Sequence[int]) -> None:
    """The result may not destroy what the op still reads."""
    tensor = node.tensor
    through = WRITES_THROUGH.get(tensor.op)
    for i, (source, size) in enumerate(zip(node.sources, source_bytes, strict=True)):
        if source is None or i == through or source.buffer is not tensor.buffer or size == 0:
            continue
        if source.offset + size <= tensor.offset or tensor.offset + n_bytes <= source.offset:
            continue
        node.require(
            ID_SOURCES.get(tensor.op) != i, f"the result overlaps source {i}, which says where to read or write"
        )
        if is_contiguous(source) and is_contiguous(tensor):  # spans of others may interleave without sharing an element
            node.require(_may_be_in_place(tensor, source, i), f"the result overlaps source {i}")


def _may_be_in_place(tensor: PlacedTensor, source: PlacedTensor, i: int) -> bool:
    """Whether an op that reads `source` may write its result over it."""
    if tensor.op is Op.CPY:
        return is_same_place(source, tensor)
    if tensor.op not in IN_PLACE or i not in IN_PLACE_SOURCES.get(tensor.op, (i,)):
        return False
    return _same_elements(source, tensor) and (i == 0 or source.ne == tensor.ne)


def _same_elements(a: PlacedTensor, b: PlacedTensor) -> bool:
    """Same start, layout and element size; the shape of one may be folded differently (CONT)."""
    return a.offset == b.offset and a.n_bytes == b.n_bytes and TRAITS[a.type] == TRAITS[b.type]


def _is_injective(tensor: PlacedTensor) -> bool:
    """Whether no two elements share bytes, judged by strides in rising order (enough for every view ggml makes)."""
    traits = TRAITS[tensor.type]
    dims = [(tensor.nb[0], tensor.ne[0] // traits.block_elements), *zip(tensor.nb[1:], tensor.ne[1:], strict=True)]
    span = traits.block_bytes
    for stride, n in sorted((stride, n) for stride, n in dims if n > 1):
        if stride < span:
            return False
        span = stride * (n - 1) + span
    return True
