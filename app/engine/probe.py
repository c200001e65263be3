"""How fast each device is for this model, measured before anything is placed: a few layers of zeros, and the head.

No weight travels: devices fill memory of their own, and kernels take as long for zeros as for anything else. What is
measured is by how much longer several ubatches take than one, so that links count only where they hold a stage up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from statistics import median_low
from typing import Any

import numpy as np

from app.engine.device import Device
from app.engine.embedding import TokenEmbedding
from app.engine.executor import Executor, Running, Scratch
from app.engine.ggml import GGMLType
from app.engine.loader import spec_bytes
from app.engine.models.base import Model, StageShape
from app.engine.placement import DeviceSpeed
from app.engine.rows import RowWish
from app.engine.serving.types import BLOCK_CELLS, Output, OutputKind, Ubatch, UbatchSequence
from app.engine.stage import Stage, StageLimits
from app.errors import OutOfDeviceMemory

log = logging.getLogger(__name__)

_FIGURES = tuple(field.name for field in fields(DeviceSpeed))

#: All devices together; a device that is slow may take longer for the least that must run.
BUDGET_S = 1.6
#: Layers are taken until they have so many bytes, so that they come from memory as the whole model does.
LAYERS_BYTES = 64 << 20
#: Prompt rows to measure with, the most that the budget allows, and the cells that stand before them.
PROMPT_ROWS = (64, 32, 16, 8)
PAST_TOKENS = 256
#: Decode rows to measure with: what one group has when many requests run.
DECODE_ROWS = 8
#: Devices that differ by less are taken to be equal.
_SAME = 1.35
#: Rounds over all devices, as far as there is time for more than one.
_ROUNDS = 4
#: Prompts are taken to have this many tokens for each time they need the head.
_TOKENS_PER_HEAD = 512
#: Ubatches that run for one measurement: one alone, and the others behind each other.
_PROMPT_RUNS, _DECODE_RUNS = 3, 5
#: What most requests need of their rows of logits.
_WISH = RowWish(40, False)


def measure(
    model: Model, devices: Sequence[Device], limits: StageLimits, clock: Callable[[], float] = time.monotonic
) -> list[DeviceSpeed] | None:
    """Seconds per weight byte on every device, in order; None if one has no memory even for this.

    Takes about `BUDGET_S` in all and leaves nothing on the devices. Blocks. Raises DeviceLost and UnsupportedOp.
    """
    began_s = clock()
    n_decode = min(DECODE_ROWS, limits.max_tokens)
    head = StageShape(model.n_layers, model.n_layers, True)
    with ExitStack() as stack:
        try:
            pairs = [
                _Pair(
                    stack.enter_context(_probe(model, device, limits, head, n_decode)),
                    stack.enter_context(_probe(model, device, limits, _some_layers(model), n_decode)),
                    n_decode,
                )
                for device in devices
            ]
        except OutOfDeviceMemory as error:
            log.warning("no room to measure devices, so all are taken to be equally fast: %s", error)
            return None
        _measure_in_turn(pairs, limits.max_tokens, began_s, clock)
    log.debug("measured %d devices in %.2f s", len(devices), clock() - began_s)
    return _alike([pair.speed() for pair in pairs])


def _measure_in_turn(pairs: Sequence[_Pair], max_tokens: int, began_s: float, clock: Callable[[], float]) -> None:
    """Rounds over all devices while there is time, so that whatever else goes on hits all alike."""
    for pair in pairs:
        pair.measure_decode(clock)
    slowest_row_s = max(pair.decode_s / pair.n_decode for pair in pairs)
    n_rows = _prompt_rows(max_tokens, slowest_row_s, BUDGET_S / (_ROUNDS + 1) / len(pairs))
    for number in range(_ROUNDS):
        round_began_s = clock()
        for pair in pairs:
            if number:
                pair.measure_decode(clock)
            pair.measure_prompt(n_rows, clock)
        if clock() - began_s + (clock() - round_began_s) > BUDGET_S:
            return


def _alike(speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """So short a look cannot tell devices apart that differ by little: those are taken to be equal."""
    columns = [_levelled([getattr(speed, name) for speed in speeds]) for name in _FIGURES]
    return [DeviceSpeed(**dict(zip(_FIGURES, row, strict=True))) for row in zip(*columns, strict=True)]


def _levelled(values: Sequence[float]) -> list[float]:
    """Each value, or the mean of all that are within `_SAME` of the smallest of its like."""
    levelled = list(values)
    left = sorted(range(len(values)), key=lambda i: values[i])
    while left:
        alike = [i for i in left if values[i] <= _SAME * values[left[0]]]
        mean = sum(values[i] for i in alike) / len(alike)
        for i in alike:
            levelled[i] = mean
        left = left[len(alike) :]
    return levelled


class _Pair:
    """One device's probes, and their times so far; the middle one counts, since a time may be too short as well."""

    def __init__(self, head: tuple[_Probe, int], layers: tuple[_Probe, int], n_decode: int) -> None:
        self._head, self._head_bytes = head
        self._layers, self._layer_bytes = layers
        self.n_decode = n_decode
        self.n_rows = 0
        self._head_times: list[float] = []
        self._decode_times: list[float] = []
        self._prompt_times: list[float] = []

    @property
    def decode_s(self) -> float:
        return median_low(self._decode_times)

    def measure_decode(self, clock: Callable[[], float]) -> None:
        rows = [1] * self.n_decode
        self._head_times.append(self._head.seconds(rows, 0, _DECODE_RUNS, clock))
        self._decode_times.append(self._layers.seconds(rows, PAST_TOKENS, _DECODE_RUNS, clock))

    def measure_prompt(self, n_rows: int, clock: Callable[[], float]) -> None:
        """Always with the same rows: few cost more each than many."""
        self.n_rows = n_rows
        self._prompt_times.append(self._layers.seconds([n_rows], PAST_TOKENS, _PROMPT_RUNS, clock))

    def speed(self) -> DeviceSpeed:
        prompt_s, head_s = median_low(self._prompt_times), median_low(self._head_times)
        return DeviceSpeed(
            layer_prompt_s=prompt_s / self.n_rows / self._layer_bytes,
            layer_decode_s=self.decode_s / self.n_decode / self._layer_bytes,
            head_prompt_s=head_s / _TOKENS_PER_HEAD / self._head_bytes,
            head_decode_s=head_s / self.n_decode / self._head_bytes,
        )


def _prompt_rows(max_tokens: int, row_s: float, left_s: float) -> int:
    """A row of a prompt takes no longer than one of decode."""
    allowed = [n for n in PROMPT_ROWS if n <= max_tokens] or [max_tokens]
    return next((n for n in allowed if _PROMPT_RUNS * n * row_s <= left_s), allowed[-1])


def _some_layers(model: Model) -> StageShape:
    """Layers from the middle of the model: the first ones are sometimes of another kind. Never the very last one,
    which computes only the rows that need logits."""
    n_bytes = [0] * model.n_layers
    for spec in model.weights():
        if 0 <= spec.layer < model.n_layers:
            n_bytes[spec.layer] += spec_bytes(spec)
    n_most = max(1, model.n_layers - 1)
    mean_bytes = max(1, sum(n_bytes) // model.n_layers)
    count = min(n_most, -(-LAYERS_BYTES // mean_bytes))
    first = (n_most - count) // 2
    return StageShape(first, first + count, False)


class _Probe:
    """One stage full of zeros with sequences of its own."""

    def __init__(self, model: Model, stage: Stage, limits: StageLimits, n_seqs: int) -> None:
        row = np.ones(model.n_embd, np.float32)
        embedding = TokenEmbedding(row.data.cast("B"), GGMLType.F32, model.n_embd, 1, 1.0)
        scratch = Scratch(cell=limits.n_cells - 1, state_row=n_seqs, first_snapshot_row=n_seqs + 1)
        self._executor = Executor(model, [stage], embedding, limits, scratch)
        self._blocks_each = limits.n_cells // BLOCK_CELLS // n_seqs
        self._n_ubatches = 0
        self._prepared: set[tuple[int, ...]] = set()

    def seconds(self, rows: Sequence[int], past: int, n_runs: int, clock: Callable[[], float]) -> float:
        """What one ubatch more takes behind others, in the mean; `rows` for every sequence.

        By how much longer several take than one, each from its submit to its end: ends in between are noticed when
        this process comes to it, the last of short ones sometimes together with the first.
        """
        if tuple(rows) not in self._prepared:
            self._prepared.add(tuple(rows))
            self._elapsed_s(rows, past, 1, clock)  # prepares, and repacks weights
        one_s = self._elapsed_s(rows, past, 1, clock)
        return max(1e-9, (self._elapsed_s(rows, past, n_runs - 1, clock) - one_s) / (n_runs - 2))

    def _elapsed_s(self, rows: Sequence[int], past: int, n: int, clock: Callable[[], float]) -> float:
        began_s = clock()
        ends = [_end(self._submit(rows, past), clock) for _ in range(n)]
        return [end.result() for end in ends][-1] - began_s  # an error may come with any of them

    def _submit(self, rows: Sequence[int], past: int) -> Running:
        self._n_ubatches += 1
        return self._executor.submit(self._ubatch(rows, past), [_WISH] * len(rows))

    def _ubatch(self, rows: Sequence[int], past: int) -> Ubatch:
        sequences, positions, cells = [], [], []
        first_row = 0
        for slot, n_rows in enumerate(rows):
            first_block = slot * self._blocks_each
            n_blocks = -(-(past + n_rows) // BLOCK_CELLS)
            blocks = np.arange(first_block, first_block + n_blocks, dtype=np.int32)
            sequences.append(UbatchSequence(f"probe-{slot}", slot, first_row, n_rows, past, blocks, n_rows == 1))
            positions.append(np.arange(past, past + n_rows, dtype=np.int32))
            cells.append(positions[-1].astype(np.int64) + first_block * BLOCK_CELLS)
            first_row += n_rows
        outputs = [Output(s.first_row + s.n_rows - 1, s.request_id, OutputKind.SAMPLE, past) for s in sequences]
        return Ubatch(
            id=self._n_ubatches,
            epoch=0,
            tokens=np.zeros(first_row, np.int32),
            positions=np.concatenate(positions),
            cells=np.concatenate(cells),
            slots=np.repeat(np.arange(len(rows), dtype=np.int32), rows),
            sequences=tuple(sequences),
            outputs=tuple(outputs),
        )


def _end(running: Running, clock: Callable[[], float]) -> Future[float]:
    """When a ubatch is done, by the lane that did it."""
    end: Future[float] = Future()

    def note(done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            end.set_exception(error)
        else:
            end.set_result(clock())

    running.done.add_done_callback(note)
    return end


@contextmanager
def _probe(
    model: Model, device: Device, limits: StageLimits, shape: StageShape, n_seqs: int
) -> Iterator[tuple[_Probe, int]]:
    """A probe of these layers, and the bytes of their weights; the device has its memory back afterwards."""
    n_tokens = min(limits.max_tokens, PROMPT_ROWS[0])
    blocks_each = -(-(PAST_TOKENS + 1) // BLOCK_CELLS)
    n_blocks = 1 + max(n_seqs * blocks_each, -(-(PAST_TOKENS + n_tokens) // BLOCK_CELLS))
    small = StageLimits(
        max_tokens=n_tokens,
        max_outputs=n_seqs,
        max_seqs=n_seqs,
        n_cells=-(-n_blocks * BLOCK_CELLS // 256) * 256,
        n_snapshots=0,
        key_type=limits.key_type,
        value_type=limits.value_type,
    )
    stage = Stage(device, model, shape, small)
    try:
        stage.reserve()
        for buffer in stage.buffers:
            device.fill(buffer, 0, buffer.size_bytes, 0)
        yield _Probe(model, stage, small, n_seqs), max(1, stage.weight_bytes())
    finally:
        stage.free()
        device.synchronize()
