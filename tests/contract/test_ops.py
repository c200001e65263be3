"""Every op against a straightforward formula, on every device."""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.device import Device
from app.engine.ggml import Op, TensorFlag
from app.engine.opcheck import RULES
from app.errors import DeviceError, DeviceLost
from tests.contract import (
    cases_activations,
    cases_attention,
    cases_dense,
    cases_elementwise,
    cases_moving,
    cases_recurrent,
    cases_rope,
    cases_softmax,
)
from tests.contract.cases import CASES, F32, I32, I64, NAN, CaseBuilder, check_untouched, place, read_all, run_case
from tests.contract.conftest import MakeDevice

#: Importing the modules has filled `CASES`.
FAMILIES = (
    cases_activations,
    cases_attention,
    cases_dense,
    cases_elementwise,
    cases_moving,
    cases_recurrent,
    cases_rope,
    cases_softmax,
)


@pytest.mark.parametrize("name", sorted(CASES))
def test_op(device: Device, name: str) -> None:
    case = CaseBuilder(name)
    CASES[name](case)
    run_case(case, device)


def test_every_op_with_a_rule_has_a_case() -> None:
    tested = set()
    for name, build in CASES.items():
        case = CaseBuilder(name)
        build(case)
        tested |= {node.op for node in case.nodes}
    assert set(RULES) <= tested


def test_nodes_without_the_compute_flag_are_skipped(device: Device) -> None:
    """A disabled branch may hold garbage ids and write nothing."""
    case = CaseBuilder("disabled")
    table, ids = case.random(F32, 4, 3), case.leaf(I32, np.array([-7, 99]))
    picked = case.node(Op.GET_ROWS, F32, (4, 2), (table, ids))
    picked.flags = TensorFlag.NONE
    doubled = case.node(Op.SCALE, F32, (4, 3), (table,), (2.0, 0.0))
    case.expect(doubled, 2 * case.values(table), "exact")
    run_case(case, device)


def test_empty_results_are_skipped(device: Device) -> None:
    """No rows wanted: everything behind them is empty, also the products."""
    case = CaseBuilder("empty")
    x, ids, weight = case.random(F32, 8, 3), case.leaf(I32, np.zeros((0,))), case.random(F32, 8, 5)
    picked = case.node(Op.GET_ROWS, F32, (8, 0), (x, ids))
    case.node(Op.MUL_MAT, F32, (5, 0), (weight, picked))
    case.expect(case.node(Op.SCALE, F32, (8, 3), (x,), (3.0, 0.0)), 3 * case.values(x))
    run_case(case, device)


def test_later_nodes_see_what_earlier_ones_wrote_to_a_cache(device: Device) -> None:
    """The reader is a view of the cache leaf: only list order and memory join it to the writer."""
    case = CaseBuilder("hidden edge")
    cache, row, ids = case.leaf(F32, np.full((3, 4), NAN)), case.random(F32, 4, 3), case.leaf(I64, np.array([2, 0, 1]))
    case.node(Op.SET_ROWS, F32, (4, 3), (row, ids, cache), alias=cache)
    view = case.view(cache, (4, 2), (4, 16, 48, 48), 16)
    case.expect(case.node(Op.SCALE, F32, (4, 2), (view,), (1.0, 0.0)), case.values(row)[0, 0, [2, 0]], "exact")
    run_case(case, device)


WRONG_IDS = [-1, 3, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_get_rows_refuses_ids_out_of_range(make_device: MakeDevice, wrong: int) -> None:
    case = CaseBuilder("wrong ids")
    table, ids = case.random(F32, 4, 3), case.leaf(I32, np.array([1, wrong]))
    case.node(Op.GET_ROWS, F32, (4, 2), (table, ids))
    refuse(case, make_device())


@pytest.mark.parametrize("wrong", [*WRONG_IDS, 2**40, -(2**63)])
def test_set_rows_refuses_ids_out_of_range(make_device: MakeDevice, wrong: int) -> None:
    """Nothing is written, not even the rows with good ids."""
    case = CaseBuilder("wrong ids")
    cache, rows, ids = case.random(F32, 4, 3), case.random(F32, 4, 2), case.leaf(I64, np.array([1, wrong]))
    case.node(Op.SET_ROWS, F32, (4, 3), (rows, ids, cache), alias=cache)
    refuse(case, make_device())


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_mul_mat_id_refuses_experts_out_of_range(make_device: MakeDevice, wrong: int) -> None:
    case = CaseBuilder("wrong ids")
    experts, x = case.random(F32, 4, 5, 3), case.random(F32, 4, 1, 2)
    ids = case.leaf(I32, np.array([[0, 1], [2, wrong]]))
    case.node(Op.MUL_MAT_ID, F32, (5, 2, 2), (experts, x, ids))
    refuse(case, make_device())


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_add_id_refuses_rows_out_of_range(make_device: MakeDevice, wrong: int) -> None:
    case = CaseBuilder("wrong ids")
    x, table, ids = case.random(F32, 4, 1, 2), case.random(F32, 4, 3), case.leaf(I32, np.array([[0], [wrong]]))
    case.node(Op.ADD_ID, F32, (4, 1, 2), (x, table, ids))
    refuse(case, make_device())


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_ssm_scan_refuses_slots_out_of_range(make_device: MakeDevice, wrong: int) -> None:
    case = CaseBuilder("wrong ids")
    state, x, dt = case.random(F32, 2, 2, 1, 3), case.random(F32, 2, 1, 1, 1), case.random(F32, 1, 1, 1)
    a, b, c, ids = (
        case.random(F32, 1, 1),
        case.random(F32, 2, 1),
        case.random(F32, 2, 1),
        case.leaf(I32, np.array([wrong])),
    )
    case.node(Op.SSM_SCAN, F32, (6,), (state, x, dt, a, b, c, ids))
    refuse(case, make_device())


def refuse(case: CaseBuilder, device: Device) -> None:
    """The run fails and the error surfaces. A worker may close the connection over it; else nothing has changed."""
    placed = place(case, device)
    handle = device.prepare(placed.program)
    device.run(handle)
    with pytest.raises(DeviceError) as caught:
        device.synchronize()
    if not isinstance(caught.value, DeviceLost):
        assert "out of range" in str(caught.value)
        np.testing.assert_array_equal(read_all(device, placed.buffer), placed.image)


def test_the_guard_zones_notice(device: Device) -> None:
    """The check for stray writes can fail."""
    case = CaseBuilder("guard")
    a = case.random(F32, 4)
    case.node(Op.SCALE, F32, (4,), (a,), (2.0, 0.0))
    placed = place(case, device)
    after = placed.image.copy()
    after[0] ^= 1
    with pytest.raises(AssertionError, match="outside the results"):
        check_untouched(placed, after)
    device.free(placed.buffer)
