"""The automatic context: the largest that fits, found without trying every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.executor import bucket
from app.engine.sizing import STEP_CELLS, largest_that_fits
from app.errors import ConfigError


@given(st.integers(STEP_CELLS, 1 << 20), st.integers(STEP_CELLS, 1 << 20))
def test_the_largest_step_that_fits_is_found(wanted: int, room: int) -> None:
    found = largest_that_fits(wanted, lambda cells: cells <= room)
    assert found == min(wanted, room) // STEP_CELLS * STEP_CELLS


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room"):
        largest_that_fits(4096, lambda _: False)


@given(st.integers(1, 600), st.integers(1, 512))
def test_buckets_hold_what_is_asked_and_waste_at_most_half(n: int, largest: int) -> None:
    size = bucket(n, largest)
    assert size >= n and (size <= largest or size == n)
    assert size <= max(1, 1.5 * n)
