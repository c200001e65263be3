"""From a model file to loaded stages: measure, place, reserve, and stream every weight to its device.

Weights go straight from the mmap to their device; the control plane keeps none of them, and gives the pages back
to the system as soon as a device has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace

from app.engine.device import Device
from app.engine.ggml import contiguous_strides, tensor_bytes
from app.engine.gguf.reader import GGUFFile
from app.engine.models.base import Model, StageShape, WeightSpec
from app.engine.placement import (
    DeviceBudget,
    DeviceSpeed,
    LayerCost,
    StageRange,
    StageSeconds,
    Tune,
    fits,
    place,
    stage_seconds,
)
from app.engine.stage import Stage, StageLimits
from app.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Uploaded:
    """How far a device's weights are. `sent_bytes`: what left for it, less than `done_bytes` where it had weights
    already; None for a device of this process."""

    device: str
    done_bytes: int
    total_bytes: int
    sent_bytes: int | None = None


#: Called from the devices' threads.
UploadProgress = Callable[[Uploaded], None]
#: (weight, its bytes) -> FNV-1a 64 of them, or None where no hash is at hand.
HashSource = Callable[[WeightSpec], Callable[[], int] | None]


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage as it would stand: its range, the bytes it asks of its device, and its times if those are known.

    `seconds` are those of one token, in a prompt's chunk and in a decode group; None where nothing was measured.
    """

    device: Device
    shape: StageShape
    weight_bytes: int
    cache_bytes: int
    state_bytes: int
    compute_bytes: int
    seconds: StageSeconds | None = None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.state_bytes + self.compute_bytes


def plan_stages(
    model: Model,
    devices: Sequence[Device],
    limits: StageLimits,
    tensor_split: Sequence[float] | None = None,
    *,
    spare: float = 0.0,
    speeds: Sequence[DeviceSpeed] | None = None,
    tune: Tune = Tune.AUTO,
) -> list[PlannedStage]:
    """Decide which layers stand where. Asks devices for their free memory; allocates and loads nothing.

    `spare` is the share of free memory to leave alone, `speeds` what `probe.measure` found, in the devices' order.
    Raises OutOfDeviceMemory or ConfigError when the model cannot be placed.
    """
    budgets = device_budgets(model, devices, limits, spare)
    if speeds is not None:
        budgets = [replace(budget, speed=speed) for budget, speed in zip(budgets, speeds, strict=True)]
    layers, head = _costs(model, limits)
    planned = []
    for stage in place(layers, head, budgets, tensor_split, tune):
        seconds = None if speeds is None else stage_seconds(stage, layers, head, speeds[stage.device])
        planned.append(_planned(model, devices[stage.device], stage, limits, seconds))
    return planned


def device_budgets(model: Model, devices: Sequence[Device], limits: StageLimits, spare: float) -> list[DeviceBudget]:
    """What every device offers now, less compute buffers for `limits`."""
    reserve_bytes = _compute_reserve_bytes(model, devices[0], limits) if devices else 0
    budgets = []
    for device in devices:
        free_bytes = int(device.memory().free_bytes * (1 - spare))
        budgets.append(DeviceBudget(name=device.name, free_bytes=free_bytes, reserve_bytes=reserve_bytes))
    return budgets


def layers_fit(
    model: Model, limits: StageLimits, budgets: Sequence[DeviceBudget], tensor_split: Sequence[float] | None = None
) -> bool:
    """Whether these budgets hold the model at all."""
    layers, head = _costs(model, limits)
    return fits(layers, head, budgets, tensor_split)


def needed_bytes(model: Model, limits: StageLimits) -> int:
    """Bytes of all weights and caches, on whatever devices."""
    layers, head = _costs(model, limits)
    return sum(cost.memory_bytes for cost in (*layers, head))


def _planned(
    model: Model, device: Device, stage: StageRange, limits: StageLimits, seconds: StageSeconds | None
) -> PlannedStage:
    shape = StageShape(stage.first_layer, stage.last_layer, stage.has_head)
    draft = Stage(device, model, shape, limits)
    return PlannedStage(
        device,
        shape,
        weight_bytes=draft.weight_bytes(),
        cache_bytes=draft.cache_bytes(),
        state_bytes=draft.state_bytes(),
        compute_bytes=draft.compute_bytes(),
        seconds=seconds,
    )


def _costs(model: Model, limits: StageLimits) -> tuple[list[LayerCost], LayerCost]:
    """Bytes of every layer and of the head, from the weights and caches the model names."""
    weights = [0] * (model.n_layers + 1)
    for spec in model.weights():
        if spec.layer >= 0:
            weights[spec.layer] += spec_bytes(spec)
    caches = [0] * model.n_layers
    for cache in model.caches():
        caches[cache.layer] += cache.leaf(limits.cache_rows(cache), limits.cache_type(cache)).n_bytes
    layers = [
        LayerCost(weight_bytes=weight_bytes, cache_bytes=cache_bytes)
        for weight_bytes, cache_bytes in zip(weights, caches, strict=False)
    ]
    return layers, LayerCost(weight_bytes=weights[-1])


def _compute_reserve_bytes(model: Model, device: Device, limits: StageLimits) -> int:
    """Compute buffers of a one-layer stage with the head: scratch does not grow with the number of layers."""
    last = StageShape(model.n_layers - 1, model.n_layers, True)
    return Stage(device, model, last, limits).compute_bytes()


def spec_bytes(spec: WeightSpec) -> int:
    """Bytes of one weight."""
    return tensor_bytes(spec.type, spec.ne, contiguous_strides(spec.type, spec.ne))


def load_stages(
    gguf: GGUFFile,
    model: Model,
    planned: Sequence[PlannedStage],
    limits: StageLimits,
    *,
    progress: UploadProgress | None = None,
    hashes: HashSource | None = None,
) -> list[Stage]:
    """Reserve memory on every device, then upload to all of them at once. Blocks until everything stands.

    When any of it fails, what was reserved is freed on all devices before the error is raised.
    """
    stages: list[Stage] = []
    try:
        for plan in planned:
            stage = Stage(plan.device, model, plan.shape, limits)
            stages.append(stage)
            stage.reserve()
        _upload(gguf, stages, progress, hashes)
    except BaseException:
        for stage in stages:
            _free_quietly(stage)
        raise
    return stages


def _free_quietly(stage: Stage) -> None:
    try:
        stage.free()
    except DeviceError:  # the device is gone, and its memory with it
        return


def upload_stage(
    gguf: GGUFFile, stage: Stage, progress: UploadProgress | None = None, hashes: HashSource | None = None
) -> list[Future[None]]:
    """Queue all weights of one stage; the futures resolve as the device takes them."""
    meter = _Meter(stage.device, stage.weight_bytes(), progress)
    futures: list[Future[None]] = []
    for spec in stage.weights:
        payload = gguf.data(spec.name)
        future = stage.load(spec, payload, hashes(spec) if hashes is not None else None)
        future.add_done_callback(_after_weight(gguf, spec, meter, len(payload)))
        futures.append(future)
    return futures


def _upload(
    gguf: GGUFFile, stages: Sequence[Stage], progress: UploadProgress | None, hashes: HashSource | None
) -> None:
    finish_upload([future for stage in stages for future in upload_stage(gguf, stage, progress, hashes)])
    for stage in stages:
        stage.device.synchronize()


def finish_upload(futures: Sequence[Future[None]]) -> None:
    """Wait for weights on their way; raises the first error among them at once."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


def _after_weight(gguf: GGUFFile, spec: WeightSpec, meter: _Meter, n_bytes: int) -> Callable[[Future[None]], None]:
    def after(_: Future[None]) -> None:
        gguf.forget(spec.name)
        meter.add(n_bytes)

    return after


class _Meter:
    """Adds up what a device has taken. Called from that device's thread alone, but read by others."""

    def __init__(self, device: Device, total_bytes: int, progress: UploadProgress | None) -> None:
        self._device = device
        self._before = device.connection
        self._total_bytes = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self._done_bytes += n_bytes
            done_bytes = self._done_bytes
        if self._progress is not None:
            self._progress(Uploaded(self._device.name, done_bytes, self._total_bytes, self._sent_bytes(done_bytes)))

    def _sent_bytes(self, done_bytes: int) -> int | None:
        """Frames count as well, and what is still on its way; neither makes it more than is done."""
        now = self._device.connection
        if now is None or self._before is None:
            return None
        return min(now.sent_bytes - self._before.sent_bytes, done_bytes)
