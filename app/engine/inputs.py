"""Where a stage's inputs stand on its device, and which of their bytes must travel.

Inputs live in a persistent buffer that nothing else uses. Small ones are packed side by side, so that one write
carries them all; masks have places of their own, and only what changed of them is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.mask import MaskRecipe
from app.engine.models.base import InputKind, InputSpec
from app.engine.plan import align_up

#: Inputs that are written alone, at a place that holds for every shape. The rest are packed behind them.
_LARGE = (InputKind.X, InputKind.MASK, InputKind.MASK_SWA)

#: What must be done to a mask on a device: all of it made anew, or these bytes written at these offsets.
MaskChange = MaskRecipe | Sequence[tuple[int, memoryview]]

#: Masks of more rows than this are made anew: they belong to prompts, whose rows are all new.
_MAX_ROWS_COMPARED = 64
#: What sending one more piece costs, in bytes: a command's header.
_PIECE_COST_BYTES = 320


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where the inputs of one shape start in the input buffer.

    `small`: the small ones in order, with where each starts in the one payload that brings them all.
    """

    offsets: Mapping[InputKind, int]
    small: tuple[tuple[InputKind, int], ...]

    def pack(self, values: Mapping[InputKind, NDArray[np.generic]]) -> bytes:
        """The small inputs as one payload for the area's `small_offset`; empty when there are none."""
        if not self.small:
            return b""
        last, start = self.small[-1]
        packed = bytearray(start + values[last].nbytes)
        for kind, start in self.small:
            value = values[kind]
            packed[start : start + value.nbytes] = value.tobytes()
        return bytes(packed)


class InputArea:
    """Offsets of a stage's inputs within its input buffer.

    Made from the input specs of the largest shape; `layout` then has room for the specs of any smaller one.
    """

    def __init__(self, largest: Sequence[InputSpec], alignment: int) -> None:
        self._alignment = alignment
        self._large: dict[InputKind, int] = {}
        at = 0
        for spec in largest:
            if spec.kind in _LARGE:
                self._large[spec.kind] = at
                at = align_up(at + spec.leaf().n_bytes, alignment)
        self.small_offset = at
        self.total_bytes = at + sum(align_up(s.leaf().n_bytes, alignment) for s in largest if s.kind not in _LARGE)

    def layout(self, specs: Sequence[InputSpec]) -> InputLayout:
        """Where each input of these specs starts."""
        offsets: dict[InputKind, int] = {}
        small = []
        at = self.small_offset
        for spec in specs:
            if spec.kind in _LARGE:
                offsets[spec.kind] = self._large[spec.kind]
            else:
                offsets[spec.kind] = at
                small.append((spec.kind, at - self.small_offset))
                at = align_up(at + spec.leaf().n_bytes, self._alignment)
        return InputLayout(offsets, tuple(small))


class MaskMirror:
    """Remembers what a mask holds on the devices and finds how to turn it into the next one."""

    def __init__(self) -> None:
        self._held: MaskRecipe | None = None
        #: Whether a recipe is short for every device: then those of prompts are not compared, however few their rows.
        self.all_build = False

    def forget(self) -> None:
        """What the devices hold is unknown; the next mask is made anew."""
        self._held = None

    def change_to(self, mask: MaskRecipe) -> MaskChange:
        """What turns the mask that is held into this one."""
        held, self._held = self._held, mask
        if held is None or held.shape != mask.shape or mask.n_tokens > _MAX_ROWS_COMPARED:
            return mask
        if self.all_build and mask.has_prompt:
            return mask
        pieces = list(_changed_runs(held.array.reshape(-1), mask.array.reshape(-1)))
        cost_bytes = sum(_PIECE_COST_BYTES + len(payload) for _, payload in pieces)
        return pieces if cost_bytes < mask.n_bytes + _PIECE_COST_BYTES else mask


def _changed_runs(held: NDArray[np.uint16], mask: NDArray[np.uint16]) -> Iterator[tuple[int, memoryview]]:
    changed = np.flatnonzero(held != mask)
    if not len(changed):
        return
    first, last = int(changed[0]), int(changed[-1]) + 1
    if (last - first) * mask.itemsize <= _PIECE_COST_BYTES:  # one decoding sequence: a cell more
        yield first * mask.itemsize, mask[first:last].data.cast("B")
        return
    breaks = np.flatnonzero(np.diff(changed) > _PIECE_COST_BYTES // mask.itemsize) + 1
    for run in np.split(changed, breaks):
        first, last = int(run[0]), int(run[-1]) + 1
        yield first * mask.itemsize, mask[first:last].data.cast("B")
