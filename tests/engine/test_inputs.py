"""Inputs of a stage: fixed places, packed small ones, masks of which only changes travel, and what masks show."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.engine.ggml import GGMLType
from app.engine.graph import shape4
from app.engine.inputs import InputArea, MaskMirror
from app.engine.mask import HIDDEN, VISIBLE, cells_of, hide_all, show_sequence
from app.engine.models.base import InputKind, InputSpec


def specs(n_tokens: int, n_kv: int) -> tuple[InputSpec, ...]:
    return (
        InputSpec(InputKind.X, GGMLType.F32, shape4((16, n_tokens))),
        InputSpec(InputKind.POSITIONS, GGMLType.I32, shape4((n_tokens,))),
        InputSpec(InputKind.KV_ROWS, GGMLType.I64, shape4((n_tokens,))),
        InputSpec(InputKind.MASK, GGMLType.F16, shape4((n_kv, n_tokens))),
        InputSpec(InputKind.OUT_IDS, GGMLType.I32, shape4((1,))),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 8))
def test_places_hold_for_every_smaller_shape(n_tokens: int, kv_steps: int) -> None:
    area = InputArea(specs(64, 2048), 32)
    offsets = area.layout(specs(n_tokens, 256 * kv_steps)).offsets
    spans = sorted((offsets[s.kind], offsets[s.kind] + s.leaf().n_bytes) for s in specs(n_tokens, 256 * kv_steps))
    assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] <= area.total_bytes and all(start % 32 == 0 for start, _ in spans)
    largest = area.layout(specs(64, 2048)).offsets
    assert all(offsets[kind] == largest[kind] for kind in (InputKind.X, InputKind.MASK))


def test_small_inputs_are_packed_at_their_offsets() -> None:
    area = InputArea(specs(8, 256), 32)
    wanted = specs(2, 256)
    values: dict[InputKind, NDArray[np.generic]] = {
        InputKind.POSITIONS: np.array([5, 6], dtype=np.int32),
        InputKind.KV_ROWS: np.array([70, 71], dtype=np.int64),
        InputKind.OUT_IDS: np.array([1], dtype=np.int32),
    }
    layout = area.layout(wanted)
    packed = layout.pack(values)
    for kind, value in values.items():
        start = layout.offsets[kind] - area.small_offset
        assert packed[start : start + value.nbytes] == value.tobytes()
    assert area.layout(wanted[:1]).pack(values) == b""


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pieces_turn_what_is_held_into_the_new_mask(data: st.DataObject) -> None:
    mirror = MaskMirror()
    held = bytearray(2 * 4 * 1024)
    for _ in range(4):
        shape = data.draw(st.sampled_from([(1, 1024), (4, 1024), (2, 512)]))
        mask = hide_all(*shape)
        for flat in data.draw(st.lists(st.integers(0, mask.size - 1), max_size=6)):
            mask.reshape(-1)[flat] = VISIBLE
        pieces = mirror.pieces(mask)
        for offset, payload in pieces:
            held[offset : offset + len(payload)] = payload
        assert bytes(held[: mask.nbytes]) == mask.tobytes()


def test_one_more_visible_cell_costs_two_bytes() -> None:
    mirror, mask = MaskMirror(), hide_all(1, 4096)
    assert sum(len(payload) for _, payload in mirror.pieces(mask)) == mask.nbytes
    longer = mask.copy()
    longer[0, 1000] = VISIBLE
    assert [(offset, len(payload)) for offset, payload in mirror.pieces(longer)] == [(2000, 2)]
    assert mirror.pieces(longer.copy()) == []
    mirror.forget()
    assert sum(len(payload) for _, payload in mirror.pieces(longer)) == mask.nbytes


def test_a_query_sees_its_own_past_through_blocks_and_window() -> None:
    blocks = np.array([1, 3], dtype=np.int32)
    cells = cells_of(blocks, 70, 64)
    assert list(cells[[0, 63, 64, 69]]) == [64, 127, 192, 197]
    positions = np.array([3, 68, 69], dtype=np.int32)
    full, windowed = hide_all(4, 256), hide_all(4, 256)
    show_sequence(full, slice(0, 3), positions, cells, None)
    show_sequence(windowed, slice(0, 3), positions, cells, 6)
    for row, position in enumerate(positions):
        assert set(np.flatnonzero(full[row] == VISIBLE)) == set(cells[: position + 1])
        assert set(np.flatnonzero(windowed[row] == VISIBLE)) == set(cells[max(0, position - 5) : position + 1])
        alone, alone_windowed = hide_all(2, 256), hide_all(2, 256)  # as a decoding sequence, in the second row
        show_sequence(alone, slice(1, 2), positions[row : row + 1], cells[: position + 1], None)
        show_sequence(alone_windowed, slice(1, 2), positions[row : row + 1], cells[: position + 1], 6)
        assert np.array_equal(alone[1], full[row]) and np.array_equal(alone_windowed[1], windowed[row])
        assert (alone[0] == HIDDEN).all() and (alone_windowed[0] == HIDDEN).all()
    assert (full[3] == HIDDEN).all()
