"""One stage: a run of layers on one device, with its weights, caches, inputs and prepared programs.

A stage knows its device's contract and nothing of what the device is. All memory is reserved once, at the largest
shape; decode allocates nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from app.engine.buckets import bucket
from app.engine.builder import GraphBuilder
from app.engine.device import Device, Handle, WeightHint
from app.engine.ggml import GGMLType, row_bytes
from app.engine.graph import Graph, Tensor, leaf
from app.engine.handover import RELAYED, HandOver, Parcel, Region, RelayedParcel
from app.engine.inputs import InputArea, InputLayout, MaskChange
from app.engine.mask import MaskRecipe
from app.engine.models.base import (
    SHARED_LAYER,
    BatchShape,
    CacheSpec,
    InputKind,
    InputSpec,
    Model,
    StageShape,
    StageTensors,
    WeightSpec,
)
from app.engine.plan import Packing, Place, ScratchLayout, lay_out_scratch, make_program, pack
from app.engine.program import Buffer, PlacedTensor
from app.engine.states import StateTable, lay_out_states

#: Embedding rows, or the output of the stage before.
StageInput = NDArray[np.float32] | Parcel

#: Prepared programs kept per stage. A shape costs some milliseconds to prepare and little memory to keep.
_MAX_PREPARED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """The largest shape a stage is reserved for, and the types its caches have.

    Rows of recurrent state: one per slot (`max_seqs`), one for padding, then the snapshots.
    """

    max_tokens: int
    max_outputs: int
    max_seqs: int
    n_cells: int
    n_snapshots: int
    key_type: GGMLType
    value_type: GGMLType

    @property
    def n_live_rows(self) -> int:
        """Rows of recurrent state that ubatches read and write; snapshots stand behind them."""
        return self.max_seqs + 1

    @property
    def n_state_rows(self) -> int:
        return self.n_live_rows + self.n_snapshots

    def cache_type(self, spec: CacheSpec) -> GGMLType:
        return self.key_type if spec.kind == "k" else self.value_type

    def cache_rows(self, spec: CacheSpec) -> int:
        return self.n_cells if spec.per == "cell" else self.n_state_rows


class Result(Enum):
    """What a stage's program leaves in its scratch. Where a stage ends before the last layer that is always rows."""

    LOGITS = auto()  # on the last stage, else rows for the next one
    HIDDEN = auto()  # rows behind the output norm
    NOTHING = auto()  # caches are written, and that is all: chunks of a prompt before its last one


@dataclass(frozen=True, slots=True)
class _Prepared:
    handle: Handle
    inputs: InputLayout
    output_offset: int


class Stage:
    """Layers of a model on a device. Reserve, load weights, then submit ubatches; used by the engine thread alone."""

    def __init__(self, device: Device, model: Model, shape: StageShape, limits: StageLimits) -> None:
        self.device = device
        self.shape = shape
        self._model = model
        self._limits = limits
        self._alignment = device.caps.alignment_bytes
        self.weights: list[WeightSpec] = stage_weights(model, shape)
        caches = [c for c in model.caches() if shape.first_layer <= c.layer < shape.last_layer]
        self._cell_caches = [c for c in caches if c.per == "cell"]
        states = [c for c in caches if c.per == "slot"]
        self._states = lay_out_states(states, limits.n_state_rows, self._alignment, device.caps.max_buffer_bytes)
        self._weight_leaves = {spec.name: leaf(spec.type, spec.ne, spec.name) for spec in self.weights}
        self._cell_leaves = {c.name: c.leaf(limits.n_cells, limits.cache_type(c)) for c in self._cell_caches}
        self._cache_leaves = {**self._cell_leaves}
        for table in self._states:
            self._cache_leaves |= table.leaves(states)
        self._places: dict[str, Place] = {}
        self._state_buffers: list[Buffer] = []
        self._layouts: dict[tuple[int, int, int, Result], ScratchLayout] = {}
        self._prepared: OrderedDict[tuple[BatchShape, Result], _Prepared] = OrderedDict()
        #: Programs prepared so far: what ran meanwhile took longer than it does otherwise.
        self.n_prepared = 0
        self.buffers: list[Buffer] = []
        self._area = InputArea(model.inputs(self._largest(), shape), self._alignment)

    @property
    def name(self) -> str:
        return f"{self.device.name} layers {self.shape.layers}"

    def on(self, device: Device) -> Stage:
        """The same layers on another device; nothing is reserved or loaded there yet."""
        return Stage(device, self._model, self.shape, self._limits)

    # -- memory ----------------------------------------------------------------------------------------------------

    def weight_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self._weight_leaves.values())

    def cache_bytes(self) -> int:
        """Keys and values."""
        return sum(tensor.n_bytes for tensor in self._cell_leaves.values())

    def state_bytes(self) -> int:
        """Recurrent state of all slots, and snapshots."""
        return sum(table.total_bytes for table in self._states)

    def compute_bytes(self) -> int:
        """Scratch and inputs at the largest shape, before what the device adds for itself."""
        return self._scratch_bytes() + self._area.total_bytes

    def reserve(self) -> None:
        """Allocate everything this stage will ever use and clear the caches. Raises OutOfDeviceMemory."""
        self._scratch = self._alloc(self._scratch_bytes())
        self._inputs = self._alloc(self._area.total_bytes)
        for leaves, cleared in ((self._weight_leaves, False), (self._cell_leaves, True)):
            sizes = [self._device_bytes(tensor) for tensor in leaves.values()]
            buffers = self._alloc_packed(pack(sizes, self._alignment, self.device.caps.max_buffer_bytes), leaves)
            for buffer in buffers if cleared else ():
                self.device.fill(buffer, 0, buffer.size_bytes, 0)
        self._state_buffers = [self._alloc_states(table) for table in self._states]
        self.device.fill(self._inputs, 0, self._inputs.size_bytes, 0)

    def _alloc_packed(self, packing: Packing, leaves: Mapping[str, Tensor]) -> list[Buffer]:
        buffers = [self._alloc(size) for size in packing.buffer_sizes]
        for name, (number, offset) in zip(leaves, packing.places, strict=True):
            self._places[name] = Place(buffers[number], offset)
        return buffers

    def _alloc_states(self, table: StateTable) -> Buffer:
        """Only the rows of slots are cleared: a snapshot's is written before it is read."""
        buffer = self._alloc(table.total_bytes)
        self.device.fill(buffer, 0, self._limits.n_live_rows * table.row_bytes, 0)
        self._places.update({name: Place(buffer, offset) for name, offset in table.offsets.items()})
        return buffer

    def _alloc(self, size_bytes: int) -> Buffer:
        buffer = self.device.alloc(size_bytes)
        self.buffers.append(buffer)
        return buffer

    def _device_bytes(self, tensor: Tensor) -> int:
        sources = tuple(_unplaced(source) for source in tensor.src if source is not None)
        return max(tensor.n_bytes, self.device.alloc_bytes(_unplaced(tensor), sources))

    def free(self) -> None:
        """Give everything back to the device, in lane order."""
        for buffer in self.buffers:
            self.device.free(buffer)
        self.buffers.clear()
        self._prepared.clear()

    # -- weights and caches ----------------------------------------------------------------------------------------

    def load(
        self, spec: WeightSpec, payload: memoryview, content_hash: Callable[[], int] | None = None
    ) -> Future[None]:
        """Send one weight to its place. `payload` stays untouched until the future resolves."""
        place = self._places[spec.name]
        hint = WeightHint(spec.name, spec.type, spec.ne, content_hash)
        return self.device.write(place.buffer, place.offset, payload, hint=hint)

    def copy_cells(self, source_cell: int, target_cell: int, n_cells: int) -> None:
        """Copy cells of every layer's keys and values, in lane order. They must not overlap."""
        for spec in self._cell_caches:
            tensor, place = self._cell_leaves[spec.name], self._places[spec.name]
            row = row_bytes(tensor.type, spec.row_elements)
            source, target = place.offset + source_cell * row, place.offset + target_cell * row
            self.device.copy(place.buffer, source, place.buffer, target, n_cells * row)

    def copy_state(self, source_row: int, target_row: int) -> None:
        """Copy all layers' recurrent state from one row to another, in lane order."""
        for table, buffer in zip(self._states, self._state_buffers, strict=True):
            size = table.row_bytes
            self.device.copy(buffer, source_row * size, buffer, target_row * size, size)

    def clear_state(self, row: int) -> None:
        """Set all layers' recurrent state in a row to zero, in lane order."""
        for table, buffer in zip(self._states, self._state_buffers, strict=True):
            self.device.fill(buffer, row * table.row_bytes, table.row_bytes, 0)

    # -- programs --------------------------------------------------------------------------------------------------

    def _largest(self) -> BatchShape:
        limits = self._limits
        return BatchShape(limits.max_tokens, limits.n_cells, limits.max_outputs, limits.max_seqs)

    def _scratch_bytes(self) -> int:
        """Scratch for the largest shapes: the longest prompt chunk and, with recurrent state, every slot at once."""
        limits, largest = self._limits, self._largest()
        shapes = [replace(largest, n_seqs=1)]
        if self._model.has_state:
            n_all = max(1, limits.max_tokens // limits.max_seqs) * limits.max_seqs
            shapes.append(replace(largest, n_tokens=n_all, n_outputs=min(n_all, limits.max_outputs)))
        results = (Result.LOGITS, Result.HIDDEN)  # what leaves nothing needs no more
        return max(self._layout(batch, result).total_bytes for batch in shapes for result in results)

    def _grow_scratch(self, size_bytes: int) -> None:
        """A shape needs more than the largest one did (its parts packed less well): move to a larger arena."""
        for prepared in self._prepared.values():
            self.device.release(prepared.handle)
        self._prepared.clear()
        self.buffers.remove(self._scratch)
        self.device.free(self._scratch)
        self._scratch = self._alloc(size_bytes)

    def _build(
        self, batch: BatchShape, result: Result
    ) -> tuple[Graph, Tensor | None, tuple[InputSpec, ...], list[Tensor]]:
        hidden = result is Result.HIDDEN
        shape = StageShape(self.shape.first_layer, self.shape.last_layer, self.shape.is_last, hidden)
        specs = self._model.inputs(batch, shape)
        inputs = {spec.kind: spec.leaf() for spec in specs}
        builder = GraphBuilder()
        output = self._model.build(builder, batch, shape, StageTensors(self._weight_leaves, self._cache_leaves, inputs))
        if result is Result.NOTHING:
            return builder.graph.effects(), None, specs, list(inputs.values())
        return builder.graph, output, specs, list(inputs.values())

    def _layout(self, batch: BatchShape, result: Result) -> ScratchLayout:
        """A layout in which every batch of this bucket finds room: a new length alone needs no other."""
        n_tokens = bucket(batch.n_tokens, self._limits.max_tokens) if batch.n_seqs == 1 else batch.n_tokens
        key = (n_tokens, batch.n_outputs, batch.n_seqs, result)
        if key not in self._layouts:
            widest = BatchShape(n_tokens, self._limits.n_cells, batch.n_outputs, batch.n_seqs)
            graph, output, _, _ = self._build(widest, result)
            self._layouts[key] = lay_out_scratch(graph, output, self._alignment, self._device_bytes)
        return self._layouts[key]

    def _program(self, batch: BatchShape, result: Result) -> _Prepared:
        key = (batch, result)
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return self._prepared[key]
        graph, output, specs, inputs = self._build(batch, result)
        placed = self._area.layout(specs)
        layout = self._layout(batch, result)
        if layout.total_bytes > self._scratch.size_bytes:
            self._grow_scratch(layout.total_bytes)
        leaves = [(tensor, self._places[name]) for name, tensor in (self._weight_leaves | self._cache_leaves).items()]
        leaves += [
            (tensor, Place(self._inputs, placed.offsets[spec.kind])) for spec, tensor in zip(specs, inputs, strict=True)
        ]
        n_outputs = batch.n_outputs if output is not None else 0
        name = f"l{self.shape.first_layer}-{self.shape.last_layer} t{batch.n_tokens} kv{batch.n_kv} o{n_outputs}"
        program = make_program(name, graph, output, leaves, self._scratch, layout)
        nodes = zip(program.nodes, graph.nodes, strict=True)
        output_offset = next((program.tensors[at].offset for at, node in nodes if node is output), 0)
        prepared = self._prepared[key] = _Prepared(self.device.prepare(program), placed, output_offset)
        self.n_prepared += 1
        if len(self._prepared) > _MAX_PREPARED:
            _, oldest = self._prepared.popitem(last=False)
            self.device.release(oldest.handle)
        return prepared

    # -- a ubatch --------------------------------------------------------------------------------------------------

    def prepare(self, batch: BatchShape, *, hidden: bool = False) -> None:
        """Do beforehand what `submit` may block for, where rows are wanted of this stage."""
        self._program(batch, Result.HIDDEN if hidden else Result.LOGITS)

    def submit(
        self,
        batch: BatchShape,
        x: StageInput,
        x_bytes: int,
        small: Mapping[InputKind, NDArray[np.generic]],
        masks: Mapping[InputKind, MaskChange],
        read_bytes: int,
        *,
        way: HandOver = RELAYED,
        hidden: bool = False,
        on_sent: Callable[[Future[None]], None] | None = None,
    ) -> Parcel:
        """Queue one ubatch: inputs, the run, and the departure of the first `read_bytes` of its output on `way`.

        `x` are embedding rows or what the stage before sent off; `masks` how they change. Never blocks, except for the
        preparation of a shape not seen before. With `read_bytes` 0 only caches are written, and the parcel says when.
        `on_sent` is called when `x` is no longer needed: it has left for the device, or was copied there.
        """
        wanted = Result.HIDDEN if hidden else Result.LOGITS
        prepared = self._program(batch, wanted if read_bytes else Result.NOTHING)
        offsets = prepared.inputs.offsets
        if packed := prepared.inputs.pack(small):
            self.device.write(self._inputs, self._area.small_offset, packed)
        for kind, change in masks.items():
            if kind in offsets:
                self._change_mask(offsets[kind], change)
        place = Region(self.device, self._inputs, offsets[InputKind.X], x_bytes)
        sent = x.deliver(place) if isinstance(x, Parcel) else self._write(place, x.data.cast("B"))
        if on_sent is not None:
            sent.add_done_callback(on_sent)
        self.device.run(prepared.handle)
        if read_bytes == 0:
            return RelayedParcel(self.device.record())
        return way.send(Region(self.device, self._scratch, prepared.output_offset, read_bytes))

    def _change_mask(self, offset: int, change: MaskChange) -> None:
        if isinstance(change, MaskRecipe):
            self.device.write_mask(self._inputs, offset, change)
        else:
            self.device.write_pieces(self._inputs, offset, change)

    @staticmethod
    def _write(place: Region, rows: memoryview) -> Future[None]:
        return place.device.write(place.buffer, place.offset, rows, size_bytes=place.n_bytes)


def stage_weights(model: Model, shape: StageShape) -> list[WeightSpec]:
    """The weights a stage needs: its layers', the shared ones, and the head's on the last stage."""

    def belongs(spec: WeightSpec) -> bool:
        if spec.layer == SHARED_LAYER:
            return shape.has_layers
        if spec.layer == model.n_layers:
            return shape.is_last
        return shape.first_layer <= spec.layer < shape.last_layer

    return [spec for spec in model.weights() if belongs(spec)]


def _unplaced(tensor: Tensor) -> PlacedTensor:
    """What a device may ask about a tensor before it has a place."""
    return PlacedTensor(
        type=tensor.type,
        ne=tensor.ne,
        nb=tensor.nb,
        op=tensor.op,
        params=tensor.params,
        flags=tensor.flags,
        src=(),
        view_src=-1,
        view_offs=0,
        buffer=None,
        offset=0,
        name=tensor.name,
    )
