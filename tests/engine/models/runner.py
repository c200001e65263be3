"""Runs a model of one or more sequences on a device, a stage after the other; no scheduler, no prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.builder import GraphBuilder
from app.engine.device import Device, Handle
from app.engine.ggml import GGMLType, row_bytes
from app.engine.gguf.quants import dequantize
from app.engine.gguf.reader import GGUFFile
from app.engine.graph import Tensor, leaf
from app.engine.models import registry
from app.engine.models.base import (
    SHARED_LAYER,
    BatchShape,
    InputKind,
    StageShape,
    StageTensors,
)
from app.engine.plan import Place, align_up, lay_out_scratch, make_program

N_CELLS = 1024
KV_STEP = 256
#: Rows of recurrent state; the last one stays zero and is what a new sequence reads.
N_SLOTS = 4
ZERO_SLOT = N_SLOTS - 1

Floats = NDArray[np.float32]


@dataclass
class _Stage:
    """Layers with their memory on the device."""

    shape: StageShape
    weights: dict[str, Tensor]
    caches: dict[str, Tensor]
    places: dict[int, Place]


@dataclass
class _Prepared:
    """A stage's program for one shape, with inputs and output in buffers of its own."""

    handle: Handle
    inputs: dict[InputKind, Place]
    output: Place
    n_bytes: int
    dims: tuple[int, int]


class Runner:
    """One model, its layers cut at `cuts`, caches of `kv_type`. Sequence s has its tokens in cells of its own."""

    def __init__(
        self,
        device: Device,
        gguf: GGUFFile,
        *,
        kv_type: GGMLType = GGMLType.F32,
        cuts: Sequence[int] = (),
        n_ctx: int | None = None,
    ) -> None:
        self.device = device
        self.gguf = gguf
        try:
            self.model = registry.load(gguf, n_ctx=n_ctx)
        except BaseException:
            device.close()
            raise
        edges = [0, *cuts, self.model.n_layers]
        last = len(edges) - 2
        self._stages = [
            self._make_stage(StageShape(first, end, i == last), kv_type)
            for i, (first, end) in enumerate(zip(edges, edges[1:], strict=False))
        ]
        self.positions: list[int] = [0] * N_SLOTS
        self.cells: list[list[int]] = [[] for _ in range(N_SLOTS)]
        self._n_used = 0
        self._prepared: dict[tuple[StageShape, BatchShape], _Prepared] = {}

    def forget(self) -> None:
        """Start over with empty caches."""
        self.positions = [0] * N_SLOTS
        self.cells = [[] for _ in range(N_SLOTS)]
        self._n_used = 0

    def close(self) -> None:
        self.device.close()

    def logits(self, tokens: Sequence[int], outputs: Sequence[int] | None = None, slot: int = 0) -> Floats:
        """Append tokens to a sequence; logits [n, vocabulary] of the given rows (all if not said)."""
        return self.batch({slot: tokens}, outputs)

    def batch(
        self,
        sequences: dict[int, Sequence[int]],
        outputs: Sequence[int] | None = None,
        *,
        hidden: bool = False,
        residuals: list[Floats] | None = None,
    ) -> Floats:
        """Append tokens to several sequences at once; the last rows of what leaves each layer go to `residuals`."""
        tokens = [t for ts in sequences.values() for t in ts]
        rows = list(range(len(tokens)) if outputs is None else outputs)
        inputs = self._inputs(sequences, rows)
        n_kv = min(N_CELLS, align_up(max(self._n_used, 1), KV_STEP))
        shape = BatchShape(len(tokens), n_kv, len(rows), len(sequences))
        x = self._embed(tokens)
        for stage in self._stages:
            for cut in self._pieces(stage.shape, hidden, by_layer=residuals is not None):
                x = self._run(stage, cut, shape, {**inputs, InputKind.X: x})
                if residuals is not None and cut.has_layers:
                    residuals.append(x[-1])
        return x

    def _pieces(self, shape: StageShape, hidden: bool, *, by_layer: bool) -> list[StageShape]:
        first, end = shape.first_layer, shape.last_layer
        if not by_layer:
            return [StageShape(first, end, shape.is_last, hidden)]
        head = [StageShape(end, end, True, hidden)] if shape.is_last else []
        return [StageShape(i, i + 1, False) for i in range(first, end)] + head

    # Memory.

    def _make_stage(self, shape: StageShape, kv_type: GGMLType) -> _Stage:
        def here(layer: int) -> bool:
            return shape.first_layer <= layer < shape.last_layer

        stage = _Stage(shape, {}, {}, {})
        for spec in self.model.weights():
            shared = spec.layer == SHARED_LAYER and shape.has_layers
            if here(spec.layer) or shared or (shape.is_last and spec.layer == self.model.n_layers):
                tensor = stage.weights[spec.name] = leaf(spec.type, spec.ne, spec.name)
                self._place(stage, tensor, self.gguf.data(spec.name))
        for cache in self.model.caches():
            if here(cache.layer):
                tensor = cache.leaf(N_CELLS if cache.per == "cell" else N_SLOTS, kv_type)
                stage.caches[cache.name] = tensor
                self._place(stage, tensor, bytes(tensor.n_bytes))
        return stage

    def _place(self, stage: _Stage, tensor: Tensor, data: bytes | memoryview) -> None:
        buffer = self.device.alloc(tensor.n_bytes)
        self.device.write(buffer, 0, data).result()
        stage.places[id(tensor)] = Place(buffer, 0)

    def _embed(self, tokens: Sequence[int]) -> Floats:
        info = self.gguf.tensor("token_embd.weight")
        width = row_bytes(info.type, info.ne[0])
        table = np.frombuffer(self.gguf.data("token_embd.weight"), np.uint8).reshape(-1, width)
        return dequantize(info.type, table[list(tokens)]) * np.float32(self.model.embed_scale)

    # Inputs.

    def _inputs(self, sequences: dict[int, Sequence[int]], rows: list[int]) -> dict[InputKind, NDArray]:
        new = sum(map(len, sequences.values()))
        n_kv = min(N_CELLS, align_up(self._n_used + new, KV_STEP))
        state_from = [slot if self.positions[slot] else ZERO_SLOT for slot in sequences]
        positions, cells = [], []
        window = self.model.windows[0] if self.model.windows else 0
        mask = np.full((new, n_kv), -np.inf, np.float16)
        mask_swa = mask.copy()
        for slot, tokens in sequences.items():
            for _ in tokens:
                at = len(positions)
                self.cells[slot].append(self._n_used)
                mask[at, self.cells[slot]] = 0
                mask_swa[at, self.cells[slot][-window:]] = 0
                positions.append(self.positions[slot])
                cells.append(self._n_used)
                self.positions[slot] += 1
                self._n_used += 1
        streams = [positions] * 3 + [[0] * new] if self.model.position_streams == 4 else [positions]
        scales = [self.model.attn_scale(p) for p in positions]
        return {
            InputKind.POSITIONS: np.array(streams, np.int32).ravel(),
            InputKind.KV_ROWS: np.array(cells, np.int64),
            InputKind.MASK: mask,
            InputKind.MASK_SWA: mask_swa,
            InputKind.OUT_IDS: np.array(rows, np.int32),
            InputKind.STATE_SLOTS: np.array(state_from, np.int32),
            InputKind.STATE_ROWS: np.array(list(sequences), np.int64),
            InputKind.ATTN_SCALE: np.array(scales, np.float32),
        }

    # Running.

    def _run(self, stage: _Stage, shape: StageShape, batch: BatchShape, values: dict[InputKind, NDArray]) -> Floats:
        key = (shape, batch)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(stage, shape, batch)
        ready = self._prepared[key]
        for kind, place in ready.inputs.items():
            data = np.ascontiguousarray(values[kind]).view(np.uint8).reshape(-1)
            assert data.nbytes == place.buffer.size_bytes, kind
            self.device.write(place.buffer, 0, memoryview(data))
        self.device.run(ready.handle)
        raw = bytes(self.device.read(ready.output.buffer, ready.output.offset, ready.n_bytes).result())
        return np.frombuffer(raw, np.float32).reshape(ready.dims)

    def _prepare(self, stage: _Stage, shape: StageShape, batch: BatchShape) -> _Prepared:
        inputs = {spec.kind: spec.leaf() for spec in self.model.inputs(batch, shape)}
        builder = GraphBuilder()
        output = self.model.build(builder, batch, shape, StageTensors(stage.weights, stage.caches, inputs))
        places = {kind: Place(self.device.alloc(tensor.n_bytes), 0) for kind, tensor in inputs.items()}
        layout = lay_out_scratch(builder.graph, output, self.device.caps.alignment_bytes)
        scratch = self.device.alloc(layout.total_bytes)
        leaves = [(tensor, places[kind]) for kind, tensor in inputs.items()]
        leaves += [(t, stage.places[id(t)]) for t in (*stage.weights.values(), *stage.caches.values())]
        program = make_program("test", builder.graph, output, leaves, scratch, layout)
        offset = layout.offsets[builder.graph.nodes.index(output.owner)] + output.view_offs
        handle = self.device.prepare(program)
        return _Prepared(handle, places, Place(scratch, offset), output.n_bytes, (output.ne[1], output.ne[0]))
