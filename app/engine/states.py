"""Where a stage keeps recurrent state: all that belongs to one slot side by side in one row.

So a snapshot of a whole stage is one copy of one row, and clearing a slot is one fill, however many layers there are.
The graphs see each cache as a tensor whose rows lie a table's row apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.engine.graph import Tensor
from app.engine.models.base import CacheSpec
from app.engine.plan import align_up, pack


@dataclass(frozen=True, slots=True)
class StateTable:
    """Some per-slot caches of a stage: byte `offsets[name]` of row r is where slot r's part of that cache begins."""

    offsets: Mapping[str, int]
    row_bytes: int
    n_rows: int

    @property
    def total_bytes(self) -> int:
        return self.row_bytes * self.n_rows

    def leaves(self, specs: Sequence[CacheSpec]) -> dict[str, Tensor]:
        """Those of these caches that stand here, as graphs see them: [row_elements, n_rows]."""
        made = {spec.name: _row(spec, self.n_rows) for spec in specs if spec.name in self.offsets}
        row, end = self.row_bytes, self.total_bytes
        return {name: replace(tensor, nb=(tensor.nb[0], row, end, end)) for name, tensor in made.items()}


def lay_out_states(
    specs: Sequence[CacheSpec], n_rows: int, alignment: int, max_buffer_bytes: int
) -> tuple[StateTable, ...]:
    """One table for all caches, or as few as buffers of that size permit. No caches, no tables."""
    sizes = [_row(spec, 1).n_bytes for spec in specs]
    packing = pack(sizes, alignment, max(1, max_buffer_bytes // n_rows))
    tables = []
    for number, row_bytes in enumerate(packing.buffer_sizes):
        places = zip(specs, packing.places, strict=True)
        offsets = {spec.name: offset for spec, (table, offset) in places if table == number}
        tables.append(StateTable(offsets, align_up(row_bytes, alignment), n_rows))
    return tuple(tables)


def state_row_bytes(specs: Sequence[CacheSpec]) -> int:
    """Bytes of recurrent state that one slot or one snapshot takes on all devices together, before alignment."""
    return sum(_row(spec, 1).n_bytes for spec in specs if spec.per == "slot")


def _row(spec: CacheSpec, n_rows: int) -> Tensor:
    """State is kept in the type the model says; what users choose is for keys and values."""
    assert spec.type is not None, spec.name
    return spec.leaf(n_rows, spec.type)
