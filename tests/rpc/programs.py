"""Small programs for tests of the wire."""

from __future__ import annotations

from app.engine.ggml import GGMLType, Op, Shape, TensorFlag, contiguous_strides
from app.engine.program import Buffer, PlacedTensor, Program


def placed(
    buffer: Buffer | None,
    offset: int = 0,
    *,
    name: str = "t",
    type_: GGMLType = GGMLType.F32,
    ne: Shape = (4, 1, 1, 1),
    nb: Shape | None = None,
    op: Op = Op.NONE,
    params: tuple[int, ...] = (),
    flags: TensorFlag = TensorFlag.NONE,
    src: tuple[int, ...] = (),
    view: tuple[int, int] = (-1, 0),
    use_count: int = 0,
) -> PlacedTensor:
    return PlacedTensor(
        type=type_,
        ne=ne,
        nb=nb or contiguous_strides(type_, ne),
        op=op,
        params=params,
        flags=flags,
        src=src,
        view_src=view[0],
        view_offs=view[1],
        buffer=buffer,
        offset=offset,
        name=name,
        use_count=use_count,
    )


def sum_program(buffer: Buffer, a: int = 0, b: int = 128, result: int = 256, name: str = "sum") -> Program:
    """result = a + b, four floats each, at these offsets of one buffer."""
    return Program(
        name,
        (
            placed(buffer, a, name="a"),
            placed(buffer, b, name="b"),
            placed(buffer, result, name="r", op=Op.ADD, src=(0, 1), flags=TensorFlag.COMPUTE),
        ),
        (2,),
    )
