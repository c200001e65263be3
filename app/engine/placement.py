"""Which layers stand on which device. Pure: numbers in, ranges out.

Devices take contiguous runs of layers in the order they are named, and the output head stands behind the last layer.
The split makes the slowest stage as fast as possible within memory; `--tensor-split` overrides it by proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import ConfigError, DoesNotFit, OutOfDeviceMemory

#: Halvings of the search for the shortest slowest stage; the interval is then below one part in 10^12.
_SEARCH_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer (or the output head) asks of the device it stands on."""

    weight_bytes: int
    cache_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """What one device offers.

    `free_bytes` is what it reports, `reserve_bytes` what compute buffers take of it. `seconds_per_byte` is the time
    one weight byte costs in a step; equal values mean equal devices.
    """

    name: str
    free_bytes: int
    reserve_bytes: int = 0
    seconds_per_byte: float = 1.0

    @property
    def usable_bytes(self) -> int:
        return max(0, self.free_bytes - self.reserve_bytes)


@dataclass(frozen=True, slots=True)
class StageRange:
    """Layers `[first_layer, last_layer)` on device number `device`; `has_head` for the last stage alone."""

    device: int
    first_layer: int
    last_layer: int
    has_head: bool

    @property
    def n_layers(self) -> int:
        return self.last_layer - self.first_layer


def place(
    layers: Sequence[LayerCost],
    head: LayerCost,
    devices: Sequence[DeviceBudget],
    tensor_split: Sequence[float] | None = None,
) -> list[StageRange]:
    """Give every layer to exactly one device; devices that get nothing are left out.

    Raises ConfigError when the split makes no sense and OutOfDeviceMemory when the model does not fit.
    """
    if not devices:
        raise ConfigError("no device to place the model on; name one with --device or --rpc")
    if tensor_split is not None:
        counts = _by_proportion(len(layers), devices, tensor_split)
    else:
        counts = _by_slowest_stage([*layers, head], devices)
    stages = _to_stages(counts, len(layers))
    if tensor_split is not None:
        _check_memory(stages, layers, head, devices)
    return stages


def _to_stages(counts: Sequence[int], n_layers: int) -> list[StageRange]:
    """Ranges from how many of the layers, head included as the last one, each device takes."""
    stages: list[StageRange] = []
    first = 0
    for device, count in enumerate(counts):
        if count == 0:
            continue
        last = first + count
        stages.append(StageRange(device, first, min(last, n_layers), last == n_layers + 1))
        first = last
    return stages


def _by_proportion(n_layers: int, devices: Sequence[DeviceBudget], split: Sequence[float]) -> list[int]:
    if len(split) != len(devices):
        raise ConfigError(f"--tensor-split names {len(split)} shares for {len(devices)} devices; give one for each")
    total = sum(split)
    if total <= 0 or min(split) < 0:
        raise ConfigError(f"--tensor-split {','.join(map(str, split))} must hold numbers of 0 or more, not all 0")
    edges = [0]
    share = 0.0
    for part in split:
        share += part
        edges.append(round(n_layers * share / total))
    edges[-1] = n_layers
    counts = [after - before for before, after in zip(edges, edges[1:], strict=False)]
    last_used = max((i for i, count in enumerate(counts) if count), default=len(counts) - 1)
    counts[last_used] += 1  # the head stands behind the last layer
    return counts


def _by_slowest_stage(items: Sequence[LayerCost], devices: Sequence[DeviceBudget]) -> list[int]:
    """Counts per device that make the slowest stage as fast as possible; `items` ends with the head.

    Filling each device as far as a time limit and its memory allow is optimal for that limit, since runs are
    contiguous and taking a layer earlier never hurts those behind; so the best limit is found by halving.
    """
    weight_bytes = sum(item.weight_bytes for item in items)
    high = weight_bytes * max(device.seconds_per_byte for device in devices)
    best = _fill(items, devices, high)
    if best is None:
        raise _does_not_fit(items, devices)
    low = 0.0
    for _ in range(_SEARCH_STEPS):
        limit = (low + high) / 2
        counts = _fill(items, devices, limit)
        if counts is None:
            low = limit
        else:
            high, best = limit, counts
    return best


def _fill(items: Sequence[LayerCost], devices: Sequence[DeviceBudget], limit_s: float) -> list[int] | None:
    counts: list[int] = []
    at = 0
    for device in devices:
        used_bytes, used_s, count = 0, 0.0, 0
        while at < len(items):
            item = items[at]
            memory_bytes = used_bytes + item.memory_bytes
            time_s = used_s + item.weight_bytes * device.seconds_per_byte
            if memory_bytes > device.usable_bytes or time_s > limit_s:
                break
            used_bytes, used_s = memory_bytes, time_s
            count += 1
            at += 1
        counts.append(count)
    return counts if at == len(items) else None


def _does_not_fit(items: Sequence[LayerCost], devices: Sequence[DeviceBudget]) -> DoesNotFit:
    """The largest run a device can hold may be less than its memory: layers are never cut."""
    offers = ", ".join(
        f"{device.name} {device.free_bytes >> 20} MiB free less {device.reserve_bytes >> 20} MiB of compute buffers"
        for device in devices
    )
    needed_bytes = sum(item.memory_bytes for item in items)
    return DoesNotFit(needed_bytes, sum(device.usable_bytes for device in devices), offers)


def _check_memory(
    stages: Sequence[StageRange], layers: Sequence[LayerCost], head: LayerCost, devices: Sequence[DeviceBudget]
) -> None:
    for stage in stages:
        needed_bytes = sum(layer.memory_bytes for layer in layers[stage.first_layer : stage.last_layer])
        needed_bytes += head.memory_bytes if stage.has_head else 0
        device = devices[stage.device]
        if device.usable_bytes < needed_bytes:
            raise OutOfDeviceMemory(device.name, needed_bytes, device.usable_bytes)
