"""ggml's numbers: tensor types, ops and their sub-enums, as they stand in GGUF files and on the RPC wire.

The values are those of llama.cpp builds 10830 (protocol 6.0) and 11434 (7.0); the two agree.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple

MAX_DIMS = 4
MAX_SRC = 10
MAX_OP_PARAMS = 16  # 32-bit words
MAX_NAME_BYTES = 64  # with the terminator


class GGMLType(IntEnum):
    """Element types. Missing numbers were removed upstream and are refused."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


class TypeTraits(NamedTuple):
    """How one type lies in memory: elements per block and bytes per block."""

    block_elements: int
    block_bytes: int


TRAITS: dict[GGMLType, TypeTraits] = {
    GGMLType.F32: TypeTraits(1, 4),
    GGMLType.F16: TypeTraits(1, 2),
    GGMLType.Q4_0: TypeTraits(32, 18),
    GGMLType.Q4_1: TypeTraits(32, 20),
    GGMLType.Q5_0: TypeTraits(32, 22),
    GGMLType.Q5_1: TypeTraits(32, 24),
    GGMLType.Q8_0: TypeTraits(32, 34),
    GGMLType.Q8_1: TypeTraits(32, 36),
    GGMLType.Q2_K: TypeTraits(256, 84),
    GGMLType.Q3_K: TypeTraits(256, 110),
    GGMLType.Q4_K: TypeTraits(256, 144),
    GGMLType.Q5_K: TypeTraits(256, 176),
    GGMLType.Q6_K: TypeTraits(256, 210),
    GGMLType.Q8_K: TypeTraits(256, 292),
    GGMLType.IQ2_XXS: TypeTraits(256, 66),
    GGMLType.IQ2_XS: TypeTraits(256, 74),
    GGMLType.IQ3_XXS: TypeTraits(256, 98),
    GGMLType.IQ1_S: TypeTraits(256, 50),
    GGMLType.IQ4_NL: TypeTraits(32, 18),
    GGMLType.IQ3_S: TypeTraits(256, 110),
    GGMLType.IQ2_S: TypeTraits(256, 82),
    GGMLType.IQ4_XS: TypeTraits(256, 136),
    GGMLType.I8: TypeTraits(1, 1),
    GGMLType.I16: TypeTraits(1, 2),
    GGMLType.I32: TypeTraits(1, 4),
    GGMLType.I64: TypeTraits(1, 8),
    GGMLType.F64: TypeTraits(1, 8),
    GGMLType.IQ1_M: TypeTraits(256, 56),
    GGMLType.BF16: TypeTraits(1, 2),
    GGMLType.TQ1_0: TypeTraits(256, 54),
    GGMLType.TQ2_0: TypeTraits(256, 66),
    GGMLType.MXFP4: TypeTraits(32, 17),
    GGMLType.NVFP4: TypeTraits(64, 36),
    GGMLType.Q1_0: TypeTraits(128, 18),
    GGMLType.Q2_0: TypeTraits(64, 18),
}


class Op(IntEnum):
    """The ops of ggml's enumeration that language models use; the wire carries these numbers."""

    NONE = 0
    DUP = 1
    ADD = 2
    ADD_ID = 3
    ADD1 = 4
    ACC = 5
    SUB = 6
    MUL = 7
    DIV = 8
    SQR = 9
    SQRT = 10
    LOG = 11
    SIN = 12
    COS = 13
    SUM = 14
    SUM_ROWS = 15
    CUMSUM = 16
    MEAN = 17
    ARGMAX = 18
    REPEAT = 20
    CONCAT = 22
    NORM = 24
    RMS_NORM = 25
    GROUP_NORM = 27
    L2_NORM = 28
    MUL_MAT = 29
    MUL_MAT_ID = 30
    OUT_PROD = 31
    SCALE = 32
    SET = 33
    CPY = 34
    CONT = 35
    RESHAPE = 36
    VIEW = 37
    PERMUTE = 38
    TRANSPOSE = 39
    GET_ROWS = 40
    SET_ROWS = 42
    DIAG = 43
    SOFT_MAX = 46
    ROPE = 48
    CLAMP = 50
    PAD = 64
    ARANGE = 67
    ARGSORT = 69
    TOP_K = 70
    LEAKY_RELU = 71
    TRI = 72
    FILL = 73
    FLASH_ATTN_EXT = 74
    SSM_CONV = 76
    SSM_SCAN = 77
    GATED_LINEAR_ATTN = 83
    SOLVE_TRI = 85
    GATED_DELTA_NET = 86
    UNARY = 91
    GLU = 100


OP_COUNT = 101

#: Ops that only rename memory; no device computes anything for them.
VIEW_OPS = frozenset({Op.NONE, Op.RESHAPE, Op.VIEW, Op.PERMUTE, Op.TRANSPOSE})


class UnaryOp(IntEnum):
    """Word 0 of the parameters of UNARY."""

    ABS = 0
    SGN = 1
    NEG = 2
    STEP = 3
    TANH = 4
    ELU = 5
    RELU = 6
    SIGMOID = 7
    GELU = 8
    GELU_QUICK = 9
    SILU = 10
    HARDSWISH = 11
    HARDSIGMOID = 12
    EXP = 13
    EXPM1 = 14
    SOFTPLUS = 15
    GELU_ERF = 16
    XIELU = 17
    FLOOR = 18
    CEIL = 19
    ROUND = 20
    TRUNC = 21


class GluOp(IntEnum):
    """Word 0 of the parameters of GLU."""

    REGLU = 0
    GEGLU = 1
    SWIGLU = 2
    SWIGLU_OAI = 3
    GEGLU_ERF = 4
    GEGLU_QUICK = 5
    SWIGLU_CLAMP = 6


class RopeMode(IntEnum):
    """Word 2 of the parameters of ROPE."""

    NORMAL = 0
    NEOX = 2
    MROPE = 8
    VISION = 24
    IMROPE = 40


class Precision(IntEnum):
    """Word 0 of the parameters of MUL_MAT, word 3 of FLASH_ATTN_EXT."""

    DEFAULT = 0
    F32 = 10


class SortOrder(IntEnum):
    """Word 0 of the parameters of ARGSORT."""

    ASC = 0
    DESC = 1


class TensorFlag(IntFlag):
    """Bits of a tensor's flags. A node without COMPUTE is skipped by every executor."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2
    PARAM = 4
    LOSS = 8
    COMPUTE = 16


Shape = tuple[int, int, int, int]


def row_bytes(type_: GGMLType, n_elements: int) -> int:
    """Bytes of one packed row. `n_elements` must be a multiple of the type's block."""
    traits = TRAITS[type_]
    return n_elements // traits.block_elements * traits.block_bytes


def contiguous_strides(type_: GGMLType, ne: Shape) -> Shape:
    """Strides in bytes of a freshly made tensor."""
    nb0 = TRAITS[type_].block_bytes
    nb1 = row_bytes(type_, ne[0])
    nb2 = nb1 * ne[1]
    return (nb0, nb1, nb2, nb2 * ne[2])


def tensor_bytes(type_: GGMLType, ne: Shape, nb: Shape) -> int:
    """Bytes from the first to past the last byte of a tensor, gaps of a view included; 0 when it is empty."""
    if min(ne) <= 0:
        return 0
    traits = TRAITS[type_]
    if traits.block_elements == 1:
        first = traits.block_bytes + (ne[0] - 1) * nb[0]
    else:
        first = ne[0] * nb[0] // traits.block_elements
    return first + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]


def is_contiguous(type_: GGMLType, ne: Shape, nb: Shape) -> bool:
    """Whether all strides are those of a freshly made tensor; dimensions of extent 1 do not count."""
    want = contiguous_strides(type_, ne)
    if ne[0] != TRAITS[type_].block_elements and nb[0] != want[0]:
        return False
    return all(n == 1 or have == need for n, have, need in zip(ne[1:], nb[1:], want[1:], strict=True))
