"""The check of programs: what must pass passes, what is refused says why, and nothing it lets through does harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType, Op, RopeMode, TensorFlag, contiguous_strides
from app.engine.graph import shape4
from app.engine.opcheck import RULES, check_program
from app.engine.program import Buffer, PlacedTensor, Program
from app.errors import DeviceError, FormatError, UnsupportedOp
from tests.contract import test_ops  # noqa: F401  fills CASES
from tests.contract.cases import CASES, F16, F32, I32, CaseBuilder, check_untouched, place, read_all

BUFFER = Buffer("CPU", 1 << 20)
INT_MAX = (1 << 31) - 1
#: Parameters of ROPE up to its sections: 8 dimensions, base 10000, no scaling.
IMROPE = (0, 8, RopeMode.IMROPE, 0, 0, *map(int, np.array([1e4, 1, 0, 1, 32, 1], np.float32).view(np.int32)))


def tensor(
    type_: GGMLType, *ne: int, offset: int = 0, op: Op = Op.NONE, src: tuple[int, ...] = (), **more: Any
) -> PlacedTensor:
    shape = shape4(ne)
    fields: dict[str, Any] = {
        "params": (),
        "flags": TensorFlag.NONE if op is Op.NONE else TensorFlag.COMPUTE,
        "view_src": -1,
        "view_offs": 0,
        "buffer": BUFFER,
        "name": op.name.lower(),
        "nb": contiguous_strides(type_, shape),
    }
    return PlacedTensor(type=type_, ne=shape, op=op, src=src, offset=offset, **(fields | more))


def program(*tensors: PlacedTensor, nodes: tuple[int, ...] | None = None) -> Program:
    computed = tuple(i for i, t in enumerate(tensors) if t.op is not Op.NONE)
    return Program("test", tensors, computed if nodes is None else nodes)


def add(**more: Any) -> Program:
    """ADD of two [4, 3] matrices, with changes to the result."""
    a, b = tensor(F32, 4, 3), tensor(F32, 4, 3, offset=256)
    return program(a, b, replace(tensor(F32, 4, 3, offset=512, op=Op.ADD, src=(0, 1)), **more))


def refused(what: Program, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_program(what, "CPU")


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_case_of_the_contract_passes(name: str) -> None:
    case = CaseBuilder(name)
    CASES[name](case)
    with_device(lambda device: check_program(place(case, device).program, device.name))


def with_device(use: Callable[[NumpyDevice], object]) -> None:
    device = NumpyDevice("CPU")
    try:
        use(device)
    finally:
        device.close()


def test_a_sound_program_passes() -> None:
    check_program(add())


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("ends at byte", {"offset": BUFFER.size_bytes - 47}),
    ("negative", {"offset": -4}),
    ("negative", {"nb": (4, -16, 48, 48)}),
    ("negative", {"ne": (4, 3, 1, -1)}),
    ("sources and", {"src": (0,) * 11}),
    ("sources and", {"params": (0,) * 17}),
    ("32-bit", {"params": (2**31,)}),
    ("32-bit", {"params": (-(2**31) - 1,)}),
    ("refers to tensor 3", {"src": (0, 3)}),
    ("refers to tensor -2", {"src": (0, -2)}),
    ("refers to tensor 9", {"view_src": 9}),
    ("own source 0", {"src": (2, 1)}),
    ("own source 1", {"src": (0, 2)}),
    ("multiples of its 4-byte", {"offset": 514}),
    ("multiples of its 4-byte", {"nb": (4, 18, 54, 54)}),
    ("times over", {"ne": (4, 3, 1000, 1), "nb": (4, 16, 0, 0)}),
    ("no place here", {"buffer": None}),
    ("not a multiple of a Q8_0 block", {"type": GGMLType.Q8_0, "ne": (33, 1, 1, 1)}),
    ("blocks 2 bytes apart", {"type": GGMLType.Q8_0, "ne": (32, 2, 1, 1), "nb": (2, 34, 68, 68)}),
]


@pytest.mark.parametrize(("words", "change"), MALFORMED)
def test_malformed_programs_are_refused(words: str, change: dict[str, Any]) -> None:
    refused(add(**change), FormatError, words)


def test_node_lists_are_checked() -> None:
    good = add()
    refused(replace(good, nodes=(3,)), FormatError, "node 0 is tensor 3")
    refused(replace(good, nodes=(-1,)), FormatError, "node 0 is tensor -1")
    refused(replace(good, nodes=(2, 2)), FormatError, "listed as a node twice")


def test_views_must_lie_inside_their_owner() -> None:
    owner = tensor(F32, 4, 3, offset=64)
    view = replace(tensor(F32, 4, 2, offset=80, op=Op.VIEW, src=(0,)), view_src=0, view_offs=16)
    check_program(program(owner, view))
    refused(program(owner, replace(view, view_offs=32, offset=96)), FormatError, "spans bytes 32 to 64")
    refused(program(owner, replace(view, offset=84)), FormatError, "does not lie where")
    refused(program(owner, replace(view, buffer=Buffer("CPU", 1 << 20))), FormatError, "does not lie where")
    refused(program(owner, view, replace(view, view_src=1)), FormatError, "does not own its memory")
    refused(program(owner, replace(view, view_src=1)), FormatError, "does not own its memory")


def test_sources_must_be_here_and_computed_before() -> None:
    a, b = tensor(F32, 4), tensor(F32, 4, offset=64)
    first = tensor(F32, 4, offset=128, op=Op.ADD, src=(0, 1))
    second = tensor(F32, 4, offset=192, op=Op.ADD, src=(2, 1))
    check_program(program(a, b, first, second))
    refused(program(a, b, first, second, nodes=(3, 2)), FormatError, "computed after it")
    refused(program(replace(a, buffer=None), b, first), FormatError, "no place here")
    check_program(program(a, b, first, second, nodes=(3,)))  # what other devices computed earlier may be named


def test_what_is_not_computed_is_not_checked_for_sense() -> None:
    """Disabled branches, empty tensors and tensors of other devices."""
    check_program(add(flags=TensorFlag.NONE, type=GGMLType.F64, ne=(1, 1, 1, 1), nb=(8, 8, 8, 8)))
    check_program(add(ne=(4, 0, 1, 1)))
    far = replace(tensor(F32, 4), buffer=None, offset=10**15)
    check_program(program(far, tensor(F32, 4)))


def test_results_may_not_destroy_what_is_still_read() -> None:
    check_program(add(offset=0))  # in place
    refused(add(offset=16), UnsupportedOp, "overlaps source 0")
    a, b = tensor(F32, 4, 4), tensor(F32, 4, 4, offset=256)
    refused(program(a, b, tensor(F32, 4, 4, op=Op.MUL_MAT, src=(0, 1))), UnsupportedOp, "overlaps source 0")
    refused(add(nb=(4, 8, 24, 24)), UnsupportedOp, "overlap each other")


def test_what_names_places_in_memory_may_not_lie_between_bytes_of_the_result() -> None:
    """Also where the strides leave gaps: a row that was written could be taken for the next id."""
    table, data = tensor(F32, 4, 8, offset=4096), tensor(F32, 4, 2, offset=8192)
    ids = tensor(I32, 2, nb=(8, 16, 16, 16))
    where = "which says where to read or write"
    got = tensor(F32, 4, 2, op=Op.GET_ROWS, src=(0, 1))
    refused(program(table, ids, got), UnsupportedOp, where)
    refused(program(table, ids, tensor(F32, 4, 2, op=Op.ADD_ID, src=(3, 0, 1)), data), UnsupportedOp, where)
    check_program(program(table, ids, replace(got, offset=64)), "CPU")
    cache = tensor(F32, 4, 8, nb=(4, 32, 256, 256))
    stored = replace(cache, op=Op.SET_ROWS, src=(2, 1, 0), flags=TensorFlag.COMPUTE, view_src=0)
    refused(program(cache, ids, data, stored), UnsupportedOp, where)
    experts, x = tensor(F32, 4, 4, 2, offset=4096), tensor(F32, 4, 1, 2, offset=8192)
    chosen = tensor(I32, 1, 2, nb=(4, 8, 16, 16))
    refused(program(experts, x, chosen, tensor(F32, 4, 1, 2, op=Op.MUL_MAT_ID, src=(0, 1, 2))), UnsupportedOp, where)


@pytest.mark.parametrize("op", [Op.ACC, Op.SET])
def test_a_window_is_not_written_over_its_second_source(op: Op) -> None:
    a, b = tensor(F32, 8, 4), tensor(F32, 8, 4, offset=256)
    node = tensor(F32, 8, 4, op=op, src=(0, 1), params=(32, 128, 128, 0))
    check_program(program(a, b, node), "CPU")
    refused(program(a, b, replace(node, offset=256)), UnsupportedOp, "overlaps source 1")


def test_a_table_of_rows_to_add_is_not_written_over() -> None:
    a, table, ids = tensor(F32, 8, 4, 1), tensor(F32, 8, 4, offset=256), tensor(I32, 4, 1, offset=512)
    node = tensor(F32, 8, 4, 1, op=Op.ADD_ID, src=(0, 1, 2))
    check_program(program(a, table, ids, node), "CPU")
    refused(program(a, table, ids, replace(node, offset=256)), UnsupportedOp, "overlaps source 1")


def test_a_copy_may_be_its_own_destination() -> None:
    a, cast = tensor(F32, 4), tensor(F16, 4, offset=64, op=Op.CPY, src=(0, 1))
    check_program(program(a, cast))
    refused(program(a, replace(cast, src=(1, 1))), FormatError, "own source 0")
    refused(program(a, tensor(F16, 4), replace(cast, src=(0, 1))), UnsupportedOp, "not its destination")


def test_ops_without_a_kernel_are_refused_by_name() -> None:
    refused(add(op=Op.OUT_PROD), UnsupportedOp, "OUT_PROD: no local device")


F32_4x3 = (F32, 4, 3)
Leaf = tuple[Any, ...]
#: (op, leaves, result, parameters, words of the refusal): one rule broken at a time.
BROKEN: list[tuple[Op, list[Leaf], Leaf, tuple[int, ...], str]] = [
    (Op.ADD, [F32_4x3], F32_4x3, (), "source 1 is missing"),
    (Op.ADD, [F32_4x3, F32_4x3, F32_4x3], F32_4x3, (), "takes no source 2"),
    (Op.ADD, [F32_4x3, (F32, 3, 3)], F32_4x3, (), "does not tile"),
    (Op.ADD, [F32_4x3, F32_4x3], (F32, 4, 2), (), "the result has shape"),
    (Op.ADD, [(I32, 4, 3), (I32, 4, 3)], (I32, 4, 3), (), "does not combine I32/I32/I32"),
    (Op.ADD, [F32_4x3, (F16, 4, 3)], F32_4x3, (), "does not combine F32/F16/F32"),
    (Op.ADD, [F32_4x3, (F32, 4, 0)], F32_4x3, (), "source 1 is empty"),
    (Op.RMS_NORM, [(I32, 4, 3)], (I32, 4, 3), (), "it may be F32"),
    (Op.RMS_NORM, [F32_4x3], F32_4x3, (-1082130432,), "epsilon is -1"),
    (Op.MUL_MAT, [(F32, 4, 3), (F32, 5, 2)], (F32, 3, 2), (), "do not multiply"),
    (Op.MUL_MAT, [(F32, 4, 3), (F32, 4, 2)], (F32, 2, 3), (), "the result has shape"),
    (Op.MUL_MAT, [(F32, 4, 3, 2), (F32, 4, 2, 3)], (F32, 3, 2, 3), (), "does not serve"),
    (Op.MUL_MAT, [(I32, 4, 3), (F32, 4, 2)], (F32, 3, 2), (), "the matrix is I32"),
    (Op.MUL_MAT, [(GGMLType.Q8_1, 32, 3), (F32, 32, 2)], (F32, 3, 2), (), "the matrix is Q8_1"),
    (Op.MUL_MAT_ID, [(F32, 4, 3, 5), (F32, 4, 1, 2), (I32, 2, 3)], (F32, 3, 2, 3), (), "ids for 3 tokens"),
    (Op.MUL_MAT_ID, [(F32, 4, 3, 5), (F32, 4, 3, 2), (I32, 2, 2)], (F32, 3, 2, 2), (), "do not serve 2 experts"),
    (Op.GET_ROWS, [F32_4x3, (GGMLType.I64, 2)], (F32, 4, 2), (), "the ids is I64"),
    (Op.GET_ROWS, [F32_4x3, (I32, 1, 2)], (F32, 4, 1, 2), (), "outer dimensions"),
    (Op.GET_ROWS, [F32_4x3, (I32, 2)], (F32, 4, 3), (), "the result has shape"),
    (Op.SOFT_MAX, [F32_4x3, (F16, 3, 3)], F32_4x3, (0x3F800000,), "does not fit"),
    (Op.SOFT_MAX, [F32_4x3, (F16, 4, 2)], F32_4x3, (0x3F800000,), "does not fit"),
    (Op.SOFT_MAX, [F32_4x3], F32_4x3, (0x3F800000, 0x41000000), "needs a mask"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 2)], (F32, 8, 2, 3), (0, 8, 0), "the positions has shape"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 3)], (F32, 8, 2, 3), (0, 10, 0), "channels 0 to 10 of 8"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 3)], (F32, 8, 2, 3), (0, 7, 0), "that must be even"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 3)], (F32, 8, 2, 3), (0, 8, 1), "no rope mode 1"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 3)], (F32, 8, 2, 3), (0, 8, 8), "the positions has shape"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 12)], (F32, 8, 2, 3), (*IMROPE, 4, -1, 4, 0), "the sections are"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 12)], (F32, 8, 2, 3), (*IMROPE, 0, 0, 0, 0), "the sections are"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 12)], (F32, 8, 2, 3), (*IMROPE, INT_MAX, INT_MAX, 2, 0), "the sections are"),
    (Op.ROPE, [(F32, 8, 2, 3), (I32, 12)], (F32, 8, 2, 3), (*IMROPE, INT_MAX // 2, 0, 0, 0), "the sections are"),
    (Op.FLASH_ATTN_EXT, [(F32, 8, 2, 4), (F16, 8, 6, 3), (F16, 8, 6, 3)], (F32, 8, 4, 2), (), "4 query heads on 3"),
    (Op.FLASH_ATTN_EXT, [(F32, 8, 2, 4), (F16, 8, 6, 2), (F16, 8, 5, 2)], (F32, 8, 4, 2), (), "same cells"),
    (
        Op.FLASH_ATTN_EXT,
        [(F32, 8, 2, 4), (F16, 8, 6, 2), (F16, 8, 6, 2), (F16, 6, 1)],
        (F32, 8, 4, 2),
        (),
        "does not fit 2",
    ),
    (Op.FLASH_ATTN_EXT, [(F32, 8, 2, 4), (F16, 8, 6, 2), (F16, 8, 6, 2)], (F32, 8, 2, 4), (), "the result has shape"),
    (Op.UNARY, [F32_4x3], F32_4x3, (22,), "22 is no unary function"),
    (Op.GLU, [F32_4x3], F32_4x3, (2,), "source 0 has shape"),
    (Op.GLU, [F32_4x3, F32_4x3], F32_4x3, (7,), "7 is no gated unit"),
    (Op.CONCAT, [F32_4x3, (F32, 5, 3)], (F32, 4, 6), (1,), "do not join along dimension 1"),
    (Op.CONCAT, [F32_4x3, F32_4x3], (F32, 4, 6), (4,), "no dimension 4"),
    (Op.REPEAT, [F32_4x3], (F32, 6, 3), (), "does not tile"),
    (Op.CONT, [F32_4x3], (F32, 4, 4), (), "do not fill"),
    (Op.CONT, [F32_4x3], (F16, 4, 3), (), "the result is F16"),
    (Op.ARGSORT, [F32_4x3], (I32, 4, 3), (2,), "no sort order"),
    (Op.TOP_K, [F32_4x3], (I32, 5, 3), (), r"\[5, 3, 1, 1\] of"),
    (Op.SET, [F32_4x3, (F32, 4, 2)], F32_4x3, (16, 48, 48, 20), "ends at byte 52 of 48"),
    (Op.SET, [F32_4x3, (F32, 4, 2)], F32_4x3, (16, 48, 48, -4), "negative stride or offset"),
    (Op.PAD, [F32_4x3], F32_4x3, (1, 0), "the result has shape"),
    (Op.SSM_CONV, [(F32, 3, 5), (F32, 4, 5)], (F32, 5, 1), (), "fewer than the kernel"),
    (
        Op.GATED_DELTA_NET,
        [(F32, 4, 2, 3), (F32, 4, 2, 3), (F32, 4, 3, 3), (F32, 1, 3, 3), (F32, 1, 3, 3), (F32, 4, 4, 3)],
        (F32, 12, 7),
        (1,),
        "do not serve",
    ),
    (Op.ARANGE, [], (F32, 4), (0, 0x40A00000, 0x3F800000), "the result has shape"),
    (Op.ARANGE, [], (F32, 4), (0, 0x40A00000, 0), "makes no sense"),
]


@pytest.mark.parametrize(("op", "leaves", "result", "params", "words"), BROKEN)
def test_broken_nodes_are_refused(
    op: Op, leaves: list[Leaf], result: Leaf, params: tuple[int, ...], words: str
) -> None:
    places = [tensor(*leaf, offset=1024 * i) for i, leaf in enumerate(leaves)]
    node = tensor(*result, offset=1024 * len(leaves), op=op, src=tuple(range(len(leaves))), params=params)
    refused(program(*places, node), UnsupportedOp, words)


def test_row_stores_must_fit_their_destination() -> None:
    def store(data: Leaf, ids: Leaf, cache: Leaf) -> Program:
        places = [tensor(*leaf, offset=1024 * i) for i, leaf in enumerate((data, ids, cache))]
        return program(*places, replace(tensor(*cache, offset=2048, op=Op.SET_ROWS, src=(0, 1, 2)), view_src=2))

    check_program(store((F32, 4, 2), (I32, 2), (F16, 4, 9)))
    refused(store((F32, 5, 2), (I32, 2), (F16, 4, 9)), UnsupportedOp, "does not fit the destination")
    refused(store((F32, 4, 2), (I32, 3), (F16, 4, 9)), UnsupportedOp, "ids for 2 rows")
    refused(store((F32, 4, 2), (F32, 2), (F16, 4, 9)), UnsupportedOp, "the ids is F32")
    refused(store((F32, 256, 2), (I32, 2), (GGMLType.Q4_K, 256, 9)), UnsupportedOp, "the destination is Q4_K")
    refused(store((F16, 4, 2), (I32, 2), (F32, 4, 9)), UnsupportedOp, "F16 rows do not go into F32")


def test_operands_must_be_packed_where_the_op_wants_it() -> None:
    turned = replace(tensor(F32, 4, 4), nb=(16, 4, 64, 64))
    for op in (Op.RMS_NORM, Op.SCALE, Op.ARGSORT, Op.SUM_ROWS):
        out = (I32, 4, 4) if op is Op.ARGSORT else (F32, 1, 4) if op is Op.SUM_ROWS else (F32, 4, 4)
        refused(program(turned, tensor(*out, offset=512, op=op, src=(0,))), UnsupportedOp, "packed|contiguous")
    product = tensor(F32, 4, 4, offset=512, op=Op.MUL_MAT, src=(0, 1))
    refused(program(turned, tensor(F32, 4, 4, offset=256), product), UnsupportedOp, "rows of the matrix are not packed")


def test_every_rule_is_about_a_known_op() -> None:
    assert all(isinstance(op, Op) for op in RULES)


# What the check lets through must not hurt: programs of the contract with a few fields changed at random.

FIELDS = ("ne", "nb", "offset", "type", "params", "src", "flags", "op")
NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 255, 256, 1000, 2**31 - 1, 2**32 - 1])


def changed(draw: Callable[[Any], Any], t: PlacedTensor, n_tensors: int) -> PlacedTensor:
    """A tensor with one field replaced, or moved a little."""
    field = draw(st.sampled_from(FIELDS))
    if field in ("ne", "nb"):
        numbers = list(getattr(t, field))
        i = draw(st.integers(0, 3))
        numbers[i] = draw(NUMBERS | st.just(numbers[i] + 4) | st.just(numbers[i] * 2) | st.just(numbers[i] // 2))
        return replace(t, **{field: tuple(numbers)})
    if field == "params":
        words = list(t.params) + [0] * (16 - len(t.params))
        words[draw(st.integers(0, 15))] = draw(NUMBERS | st.integers(-(2**31), 2**31 - 1))
        return replace(t, params=tuple(words))
    if field == "src" and t.src:
        sources = list(t.src)
        sources[draw(st.integers(0, len(sources) - 1))] = draw(st.integers(-1, n_tensors - 1))
        return replace(t, src=tuple(sources))
    if field == "type":
        return replace(t, type=draw(st.sampled_from(list(GGMLType))))
    if field == "op":
        return replace(t, op=draw(st.sampled_from(list(RULES))))
    if field == "offset":
        return replace(t, offset=t.offset + draw(st.sampled_from([-64, -4, -2, 2, 4, 64, 4096])))
    return t


@pytest.fixture(scope="module")
def reference():  # type: ignore[no-untyped-def]
    device = NumpyDevice("CPU", memory_limit_bytes=1 << 28)
    yield device
    device.close()


@given(name=st.sampled_from(sorted(CASES)), data=st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_programs_are_refused_or_stay_inside_their_results(
    reference: NumpyDevice, name: str, data: st.DataObject
) -> None:
    case = CaseBuilder(name)
    CASES[name](case)
    placed = place(case, reference)
    tensors = list(placed.program.tensors)
    for _ in range(data.draw(st.integers(1, 2))):
        i = data.draw(st.integers(0, len(tensors) - 1))
        tensors[i] = changed(data.draw, tensors[i], len(tensors))
    placed.program = replace(placed.program, tensors=tuple(tensors))
    try:
        handle = reference.prepare(placed.program)
        reference.run(handle)
        reference.synchronize()
    except (FormatError, DeviceError):
        pass
    else:
        check_untouched(placed, np.array(read_all(reference, placed.buffer)))
    finally:
        reference.free(placed.buffer)
        reference.synchronize()
