"""Runs ubatches over the stages of a model.

For each ubatch the executor looks the embedding rows up, makes the masks once for all stages, and queues everything on
every lane at once: a stage's input is what the stage before sends off, so boundary activations pass from lane to lane
without the engine's thread; `handover` says on which ways. Several ubatches may be in flight; lanes keep them in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from app.engine.buckets import bucket, buckets, kv_bucket
from app.engine.embedding import TokenEmbedding
from app.engine.handover import RELAYED, Boundaries, HandOver, Parcel, RelayedParcel, Selected, when_all
from app.engine.inputs import MaskMirror
from app.engine.mask import MaskRecipe, MaskRows, runs_of
from app.engine.models.base import BatchShape, InputKind, Model
from app.engine.rows import Row, RowSelection, RowWish, selection_of, whole_rows
from app.engine.serving.types import BLOCK_CELLS, StateAction, StateOp, Ubatch
from app.engine.stage import Stage, StageInput, StageLimits
from app.engine.trace import UbatchMarks

_F32_BYTES = 4
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Rows nobody looks at, for padding, and where snapshots of recurrent state begin."""

    cell: int
    state_row: int
    first_snapshot_row: int


@dataclass(frozen=True, slots=True)
class Running:
    """A ubatch on its way. `done` resolves when its last stage has answered, or fails with what went wrong.

    `n_prepared`: the executor's count of prepared programs before it was submitted. `x`: resolves to its embedding rows
    once `Executor.fill` has been told its tokens; None where they were known.
    """

    ubatch: Ubatch
    done: Future[memoryview] | Future[None]
    width: int
    selection: RowSelection | None
    marks: UbatchMarks
    n_prepared: int = 0
    x: Future[memoryview] | None = None

    @property
    def lacks_tokens(self) -> bool:
        return self.x is not None and not self.x.done()

    def rows(self) -> list[Row]:
        """The output rows: logits as far as they were wished for, or hidden states. Call when `done` has resolved."""
        result = self.done.result()
        if result is None:
            return []
        return whole_rows(result, self.width) if self.selection is None else self.selection.rows(result)


class Executor:
    """One model over its stages; used by the engine's thread alone."""

    def __init__(
        self,
        model: Model,
        stages: Sequence[Stage],
        embedding: TokenEmbedding,
        limits: StageLimits,
        scratch: Scratch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.stages = list(stages)
        self._model = model
        self._embedding = embedding
        self._limits = limits
        self._scratch = scratch
        self._mirrors = {InputKind.MASK: MaskMirror(), InputKind.MASK_SWA: MaskMirror()}
        taken = {kind for stage in stages for kind in model.input_kinds(stage.shape)}
        self._small_kinds = [kind for kind in _SMALL_INPUTS if kind in taken]
        self._boundaries = Boundaries()
        self.connect_stages()

    def connect_stages(self) -> None:
        """Choose how boundaries travel; once more after a stage was rebuilt. Blocks while routes are tried."""
        devices = [stage.device for stage in self.stages]
        self._boundaries.connect(devices)
        for mirror in self._mirrors.values():
            mirror.all_build = all(device.builds_masks for device in devices)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The padded numbers of rows that ubatches have."""
        return buckets(self._limits.max_tokens)

    @property
    def n_prepared(self) -> int:
        """Programs that all stages have prepared so far."""
        return sum(stage.n_prepared for stage in self.stages)

    def forget_inputs(self) -> None:
        """What the devices hold is unknown (a stage was rebuilt): make masks anew next time."""
        for mirror in self._mirrors.values():
            mirror.forget()

    def submit(self, ubatch: Ubatch, wishes: Sequence[RowWish] = (), *, hidden: bool = False) -> Running:
        """Queue a ubatch on all stages, with its copies and state moves. Never blocks, except to prepare a new shape.

        `wishes`: how much of each output row is needed at least; without any, all of them whole. `hidden`: return the
        rows after the output norm instead of logits. One that follows another waits in the lanes for `fill`, and all
        that is submitted later behind it.
        """
        n_prepared = self.n_prepared
        self._move(ubatch, ubatch.before)
        batch = self._batch(ubatch)
        small = self._small_inputs(ubatch, batch)
        masks = {kind: self._mirrors[kind].change_to(mask) for kind, mask in self._masks(ubatch, batch).items()}
        n_embd, n_rows = self._model.n_embd, ubatch.n_tokens
        width = n_embd if hidden else self._model.n_vocab
        later: Future[memoryview] | None = None
        if ubatch.follows is not None:
            later = Future()
            for stage in self.stages:  # or a new shape's questions may be queued behind the stage before, which waits
                stage.prepare(batch, hidden=hidden)
        x: StageInput = self._embedding.rows(ubatch.tokens) if later is None else RelayedParcel(later)
        way: HandOver = RELAYED
        devices = [stage.device for stage in self.stages]
        selection = selection_of(wishes, width) if devices[-1].selects_rows and not hidden else None
        last_way = RELAYED if selection is None else Selected(selection)
        parcels: list[Parcel] = []
        marks = UbatchMarks(self._clock, self._clock(), batch.n_tokens)
        try:
            for number, stage in enumerate(self.stages):
                if n_rows == 0:  # a head on its own has nothing to do
                    break
                x_bytes = n_rows * n_embd * _F32_BYTES
                if stage.shape.last_layer == self._model.n_layers:
                    n_rows = len(ubatch.outputs)
                columns = width if stage.shape.is_last else n_embd
                read_bytes, mark = n_rows * columns * _F32_BYTES, marks.next_stage(x_bytes, way.name)
                way = last_way if stage.shape.is_last else self._boundaries.way(number, devices)
                on_sent = marks.on_sent(mark)
                x = parcel = stage.submit(
                    batch, x, x_bytes, small, masks, read_bytes, way=way, hidden=hidden, on_sent=on_sent
                )
                parcel.left.add_done_callback(marks.on_done(mark))  # before the next stage's lane hears of it
                parcels.append(parcel)
        except BaseException:
            if later is not None:  # a stage that works would wait for it for ever
                later.set_result(self._rows_of(ubatch.tokens))
            raise
        for op in ubatch.after:
            self._move_state(op)
        done = when_all(parcels[-1].left, [proof for parcel in parcels for proof in parcel.proofs])
        return Running(ubatch, done, width, selection, marks, n_prepared, later)

    def fill(self, running: Running, tokens: Sequence[int]) -> None:
        """Let a ubatch that was submitted without its tokens run."""
        assert running.x is not None
        running.marks.submitted_s = self._clock()
        running.x.set_result(self._rows_of(np.array(tokens, np.int32)))

    def _rows_of(self, tokens: NDArray[np.int32]) -> memoryview:
        return self._embedding.rows(tokens).data.cast("B")

    def _move(self, ubatch: Ubatch, ops: Sequence[StateOp]) -> None:
        for copy in ubatch.copies:
            for stage in self.stages:
                stage.copy_cells(copy.source_cell, copy.target_cell, copy.n_cells)
        for op in ops:
            self._move_state(op)

    def _move_state(self, op: StateOp) -> None:
        snapshot_row = self._scratch.first_snapshot_row + op.snapshot
        for stage in self.stages:
            if op.action is StateAction.CLEAR:
                stage.clear_state(op.slot)
            elif op.action is StateAction.RESTORE:
                stage.copy_state(snapshot_row, op.slot)
            else:
                stage.copy_state(op.slot, snapshot_row)

    def _batch(self, ubatch: Ubatch) -> BatchShape:
        """The shape bucket: padded by tokens, or by whole sequences where the model keeps recurrent state."""
        n_kv = min(kv_bucket(ubatch.n_kv), self._limits.n_cells)
        n_outputs = bucket(max(1, len(ubatch.outputs)), self._limits.max_outputs)
        if not self._model.has_state:
            return BatchShape(bucket(max(ubatch.n_tokens, n_outputs), self._limits.max_tokens), n_kv, n_outputs, 1)
        seq_tokens = ubatch.sequences[0].n_rows
        n_most = min(self._limits.max_seqs, self._limits.max_tokens // seq_tokens)
        n_seqs = bucket(len(ubatch.sequences), n_most)
        return BatchShape(n_seqs * seq_tokens, n_kv, n_outputs, n_seqs)

    def _small_inputs(self, ubatch: Ubatch, batch: BatchShape) -> dict[InputKind, NDArray[np.generic]]:
        """Every small input that some stage takes, at the bucket's size. Padding rows write where nobody looks."""
        return {kind: _SMALL_INPUTS[kind](self, ubatch, batch) for kind in self._small_kinds}

    def _positions(self, ubatch: Ubatch, batch: BatchShape) -> NDArray[np.generic]:
        positions = _padded(ubatch.positions, batch.n_tokens, 0)
        if self._model.position_streams == 1:
            return positions
        streams = [positions] * min(3, self._model.position_streams)
        if self._model.position_streams == 4:
            streams.append(np.zeros_like(positions))
        return np.concatenate(streams)

    def _kv_rows(self, ubatch: Ubatch, batch: BatchShape) -> NDArray[np.generic]:
        return _padded(ubatch.cells, batch.n_tokens, self._scratch.cell)

    def _out_ids(self, ubatch: Ubatch, batch: BatchShape) -> NDArray[np.generic]:
        out_ids = np.array([output.row for output in ubatch.outputs], dtype=np.int32)
        return _padded(out_ids, batch.n_outputs, 0)

    def _state_slots(self, ubatch: Ubatch, batch: BatchShape) -> NDArray[np.int32]:
        seq_slots = np.array([s.slot for s in ubatch.sequences], dtype=np.int32)
        return _padded(seq_slots, batch.n_seqs, self._scratch.state_row)

    def _state_rows(self, ubatch: Ubatch, batch: BatchShape) -> NDArray[np.generic]:
        return self._state_slots(ubatch, batch).astype(np.int64)

    def _attn_scale(self, ubatch: Ubatch, batch: BatchShape) -> NDArray[np.generic]:
        positions = _padded(ubatch.positions, batch.n_tokens, 0).tolist()
        return np.array([self._model.attn_scale(position) for position in positions], dtype=np.float32)

    def _masks(self, ubatch: Ubatch, batch: BatchShape) -> dict[InputKind, MaskRecipe]:
        windows: dict[InputKind, int | None] = {InputKind.MASK: None}
        if self._model.windows:
            windows[InputKind.MASK_SWA] = self._model.windows[0]
        rows = tuple(
            MaskRows(s.first_row, s.n_rows, runs_of(s.blocks, s.n_visible, BLOCK_CELLS)) for s in ubatch.sequences
        )
        return {kind: MaskRecipe(batch.n_tokens, batch.n_kv, window, rows) for kind, window in windows.items()}


#: How each small input is made.
_SMALL_INPUTS: Mapping[InputKind, Callable[[Executor, Ubatch, BatchShape], NDArray[np.generic]]] = {
    InputKind.POSITIONS: Executor._positions,
    InputKind.KV_ROWS: Executor._kv_rows,
    InputKind.OUT_IDS: Executor._out_ids,
    InputKind.STATE_SLOTS: Executor._state_slots,
    InputKind.STATE_ROWS: Executor._state_rows,
    InputKind.ATTN_SCALE: Executor._attn_scale,
}


def _padded(values: NDArray[_T], n: int, filler: int) -> NDArray[_T]:
    if len(values) == n:
        return values
    padded = np.empty(n, dtype=values.dtype)
    padded[: len(values)] = values
    padded[len(values) :] = filler
    return padded
