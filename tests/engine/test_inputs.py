"""Inputs of a stage: fixed places, packed small ones, masks of which only changes travel."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.engine.ggml import GGMLType
from app.engine.graph import shape4
from app.engine.inputs import InputArea, MaskChange, MaskMirror
from app.engine.mask import CellRun, MaskRecipe, MaskRows
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


def decoding(n_tokens: int, n_kv: int, *lengths: int, window: int | None = None) -> MaskRecipe:
    """Sequences of these lengths in cells of their own, a row of each."""
    part = n_kv // max(1, len(lengths))
    rows = tuple(MaskRows(row, 1, (CellRun(row * part, n),)) for row, n in enumerate(lengths))
    return MaskRecipe(n_tokens, n_kv, window, rows)


def prompt(n_tokens: int, n_kv: int, length: int) -> MaskRecipe:
    """The last rows of one sequence."""
    return MaskRecipe(n_tokens, n_kv, None, (MaskRows(0, n_tokens, (CellRun(0, length),)),))


def apply(held: bytearray, change: MaskChange) -> None:
    """What a stage does to its inputs."""
    pieces = [(0, change.array.data.cast("B"))] if isinstance(change, MaskRecipe) else change
    for offset, payload in pieces:
        held[offset : offset + len(payload)] = payload


@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_changes_turn_what_is_held_into_the_new_mask(data: st.DataObject, all_build: bool) -> None:
    mirror = MaskMirror()
    mirror.all_build = all_build
    held = bytearray(2 * 4 * 1024)
    for _ in range(4):
        n_tokens, n_kv = data.draw(st.sampled_from([(1, 1024), (4, 1024), (2, 512)]))
        if data.draw(st.booleans()):
            lengths = data.draw(st.lists(st.integers(1, n_kv // n_tokens), max_size=n_tokens))
            mask = decoding(n_tokens, n_kv, *lengths, window=data.draw(st.sampled_from([None, 1, 100])))
        else:
            mask = prompt(n_tokens, n_kv, data.draw(st.integers(n_tokens, n_kv)))
        apply(held, mirror.change_to(mask))
        assert bytes(held[: mask.n_bytes]) == mask.array.tobytes()


def test_one_more_visible_cell_costs_two_bytes() -> None:
    mirror = MaskMirror()
    first, longer = decoding(1, 4096, 1000), decoding(1, 4096, 1001)
    assert mirror.change_to(first) is first
    assert [(offset, len(payload)) for offset, payload in mirror.change_to(longer)] == [(2000, 2)]
    assert mirror.change_to(decoding(1, 4096, 1001)) == []
    mirror.forget()
    assert mirror.change_to(longer) is longer


def test_masks_of_prompts_are_made_anew_without_being_looked_at() -> None:
    """Unless somebody does not make masks of recipes, and there are few rows: then changes are shorter."""
    mirror = MaskMirror()
    mirror.all_build = True
    large, small = [prompt(128, 512, n) for n in (128, 256)], [prompt(4, 512, n) for n in (260, 264)]
    for mask in (*large, *small):
        assert mirror.change_to(mask) is mask
        assert "array" not in vars(mask)
    mirror.all_build = False
    assert mirror.change_to(large[0]) is large[0] and mirror.change_to(large[1]) is large[1]
    mirror.change_to(small[0])
    assert isinstance(mirror.change_to(small[1]), list)
