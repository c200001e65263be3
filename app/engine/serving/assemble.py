"""From a plan (which sequence gets how many rows) to the arrays of a ubatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from app.engine.serving.sequence import Sequence
from app.engine.serving.types import BLOCK_CELLS, Output, OutputKind, UbatchSequence


@dataclass(slots=True)
class Rows:
    """A ubatch's rows in the making; see `Ubatch` for the arrays."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sequences: list[UbatchSequence] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)


def assemble(plan: Iterable[tuple[Sequence, int]], generation: int, scratch_cell: int) -> Rows:
    """Lay out the rows of a plan. `generation` is the block pool's, after every block of the plan was reserved."""
    rows = Rows()
    for sequence, n_rows in plan:
        start, end, slot = sequence.n_scheduled, sequence.n_scheduled + n_rows, sequence.slot
        blocks, is_decode = sequence.indices(generation), sequence.is_decoding
        first_row = len(rows.tokens)
        rows.sequences.append(UbatchSequence(sequence.id, slot, first_row, n_rows, start, blocks, is_decode))
        if is_decode and start >= sequence.n_kv:  # nearly every sequence of nearly every ubatch
            rows.outputs.append(Output(first_row, sequence.id, OutputKind.SAMPLE, end))
            rows.tokens.append(sequence.tokens[start])
            rows.positions.append(start)
            rows.cells.append(sequence.blocks[-1].first_cell + start % BLOCK_CELLS)
            rows.slots.append(slot)
            continue
        _add_outputs(rows, sequence, start, end)
        rows.tokens.extend(sequence.tokens[start:end])
        rows.positions.extend(range(start, end))
        rows.cells.extend(_cells(blocks, start, end, sequence.n_kv, scratch_cell))
        rows.slots.extend([slot] * n_rows)
    return rows


def assemble_ahead(sequences: Iterable[Sequence], generation: int) -> Rows:
    """A row for each sequence's next token, which is not drawn yet; its block is reserved."""
    rows = Rows()
    for row, sequence in enumerate(sequences):
        position, blocks = sequence.n_known, sequence.indices(generation)
        rows.sequences.append(UbatchSequence(sequence.id, sequence.slot, row, 1, position, blocks, is_decode=True))
        rows.outputs.append(Output(row, sequence.id, OutputKind.SAMPLE, position + 1))
        rows.tokens.append(0)
        rows.positions.append(position)
        rows.cells.append(sequence.blocks[-1].first_cell + position % BLOCK_CELLS)
        rows.slots.append(sequence.slot)
    return rows


def _cells(blocks: NDArray[np.int32], start: int, end: int, n_kv: int, scratch_cell: int) -> list[int]:
    """Where the rows' KV goes. Positions below `n_kv` have theirs already, maybe shared: it is not written twice."""
    fresh = max(start, n_kv)
    cells = [scratch_cell] * (min(fresh, end) - start)
    while fresh < end:
        place, offset = divmod(fresh, BLOCK_CELLS)
        n = min(end - fresh, BLOCK_CELLS - offset)
        first = int(blocks[place]) * BLOCK_CELLS + offset
        cells.extend(range(first, first + n))
        fresh += n
    return cells


def _add_outputs(rows: Rows, sequence: Sequence, start: int, end: int) -> None:
    """Which of the rows of positions [start, end) need logits, and for what."""
    offset = len(rows.tokens) - start
    if sequence.request.prompt_logprobs:
        for position in range(max(start, sequence.n_scored), min(end, sequence.n_prompt - 1)):
            target = sequence.tokens[position + 1]
            kind = OutputKind.PROMPT_LOGPROB
            rows.outputs.append(Output(offset + position, sequence.id, kind, position + 1, target))
    if end == sequence.n_known and sequence.wants_sample:
        rows.outputs.append(Output(offset + end - 1, sequence.id, OutputKind.SAMPLE, end))
