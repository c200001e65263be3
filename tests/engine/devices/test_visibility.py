"""Masks as groups of queries: every visible cell in exactly one group, and no work for what nobody sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.devices.reference import visibility
from app.engine.devices.reference.visibility import Visibility, everything, read_mask

INF = np.inf


def rebuilt(seen: Visibility, shape: tuple[int, int]) -> np.ndarray:
    """The mask that the groups describe; NaN where two groups claim a row."""
    mask = np.full(shape, -INF)
    claimed = np.zeros(shape[0], int)
    for group in seen.groups:
        claimed[group.rows] += 1
        part = np.zeros((group.rows.stop - group.rows.start, mask[:, group.cells].shape[1]))
        if group.bias is not None:
            part = part + group.bias
        if group.hidden is not None:
            part = np.where(group.hidden, -INF, part)
        mask[group.rows, group.cells] = part
    claimed[seen.blind] += 1
    mask[claimed != 1] = np.nan
    return mask


@given(
    mask=st.integers(1, 12).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from([-INF, -INF, 0.0, -1.5]), min_size=n, max_size=n), min_size=1, max_size=9
        )
    )
)
@settings(max_examples=150, deadline=None)
def test_groups_describe_the_mask(mask: list[list[float]]) -> None:
    plane = np.array(mask, np.float16)
    np.testing.assert_array_equal(rebuilt(read_mask(plane, 2), plane.shape), plane)


def test_a_prompt_is_one_group_over_what_it_sees() -> None:
    plane = np.where(np.arange(512) <= np.arange(40)[:, None] + 100, 0, -INF).astype(np.float16)
    (group,) = read_mask(plane, 4).groups
    assert group.rows == slice(0, 40)
    assert group.cells == slice(0, 140)
    assert group.bias is None
    assert group.n_scores == 40 * 140


def test_a_decoded_token_sees_its_cells_and_nothing_is_hidden_among_them() -> None:
    plane = np.full((1, 256), -INF, np.float16)
    plane[0, 64:100] = 0
    (group,) = read_mask(plane, 4).groups
    assert group.cells == slice(64, 100)
    assert group.hidden is None


def test_sequences_with_cells_of_their_own_are_groups_of_their_own() -> None:
    plane = np.full((3, 256), -INF, np.float16)
    for row, cells in enumerate(([0, 1, 2], [64, 65], [128, 200])):
        plane[row, cells] = 0
    groups = read_mask(plane, 4).groups
    assert [group.rows for group in groups] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    np.testing.assert_array_equal(groups[2].cells, [128, 200])


def test_rows_that_see_nothing_are_blind() -> None:
    plane = np.full((4, 8), -INF, np.float16)
    plane[1, 3] = 0
    seen = read_mask(plane, 1)
    np.testing.assert_array_equal(seen.blind, [0, 2, 3])
    assert len(seen.groups) == 1


@pytest.mark.parametrize("heads", [1, 64])
def test_groups_stay_within_bounds(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "MAX_SCORES", 4096)
    monkeypatch.setattr(visibility, "MAX_GROUP_ROWS", 16)
    plane = np.zeros((50, 100), np.float16)
    for seen in (read_mask(plane, heads), everything(50, 100, heads)):
        rows = [group.rows.stop - group.rows.start for group in seen.groups]
        assert sum(rows) == 50
        assert max(rows) == max(1, min(16, 4096 // (heads * 100)))
