"""Which layers stand on which device. Pure: numbers in, ranges out.

Devices take contiguous runs of layers in the order they are named, and the output head stands behind the last layer.
The split makes the slowest stage as fast as possible within memory, for prompts, for decode, or for a mix of both: the
head reads as many bytes as several layers and counts in every step of decode, but for one row of a whole prompt.
`--tensor-split` overrides it by proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from app.errors import ConfigError, DoesNotFit, OutOfDeviceMemory
from app.units import mib

#: Halvings of the search for the shortest slowest stage; the interval is then below one part in 10^12.
_SEARCH_STEPS = 40
#: Placements looked at, each better for decode than the one before, when prompts and decode both count.
_MAX_TRADES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer (or the output head) asks of the device it stands on."""

    weight_bytes: int
    cache_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


class Tune(StrEnum):
    """What a placement shall be fast for."""

    PROMPT = "prompt"
    DECODE = "decode"
    AUTO = "auto"


#: What counts of the kind that goes first, and of the other. AUTO: a conversation reads several times what it writes.
_SHARES = {Tune.PROMPT: (1.0, 0.0), Tune.DECODE: (1.0, 0.0), Tune.AUTO: (8.0, 1.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Seconds that a weight byte costs on a device, of a layer and of the head, for each token of a prompt or decoded.

    The default is a device of which nothing is known: all such are equal, decode costs as its bytes, and of a prompt
    the head sees so few rows that it costs next to nothing.
    """

    layer_prompt_s: float = 1.0
    layer_decode_s: float = 1.0
    head_prompt_s: float = 0.01
    head_decode_s: float = 1.0

    def times(self, factor: float) -> DeviceSpeed:
        """A device that takes `factor` times as long for everything."""
        return DeviceSpeed(
            layer_prompt_s=self.layer_prompt_s * factor,
            layer_decode_s=self.layer_decode_s * factor,
            head_prompt_s=self.head_prompt_s * factor,
            head_decode_s=self.head_decode_s * factor,
        )


UNKNOWN_SPEED = DeviceSpeed()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """What one device offers.

    `free_bytes` is what it reports, `reserve_bytes` what compute buffers take of it.
    """

    name: str
    free_bytes: int
    reserve_bytes: int = 0
    speed: DeviceSpeed = UNKNOWN_SPEED

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
    tune: Tune = Tune.AUTO,
) -> list[StageRange]:
    """Give every layer to exactly one device; devices that get nothing are left out.

    Raises ConfigError when the split makes no sense and OutOfDeviceMemory when the model does not fit.
    """
    if not devices:
        raise ConfigError("no device to place the model on; name one with --device or --rpc")
    if tensor_split is not None:
        counts = _by_proportion(len(layers), devices, tensor_split)
    else:
        counts = _by_slowest_stage([*layers, head], devices, tune)
    stages = _to_stages(counts, len(layers))
    if tensor_split is not None:
        _check_memory(stages, layers, head, devices)
    return stages


def fits(
    layers: Sequence[LayerCost],
    head: LayerCost,
    devices: Sequence[DeviceBudget],
    tensor_split: Sequence[float] | None = None,
) -> bool:
    """Whether there is a placement within memory, of whatever speed."""
    if tensor_split is None:
        costs = [*layers, head]
        items = _Items([cost.memory_bytes for cost in costs], [[StageSeconds()] * len(costs)] * len(devices))
        return _fill(items, devices, StageSeconds()) is not None
    try:
        place(layers, head, devices, tensor_split)
    except OutOfDeviceMemory:
        return False
    return True


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


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """A stage's time for one token of a prompt, and for one decoded token."""

    prompt_s: float = 0.0
    decode_s: float = 0.0

    def plus(self, other: StageSeconds) -> StageSeconds:
        return StageSeconds(self.prompt_s + other.prompt_s, self.decode_s + other.decode_s)


def stage_seconds(stage: StageRange, layers: Sequence[LayerCost], head: LayerCost, speed: DeviceSpeed) -> StageSeconds:
    """What a stage takes on a device of this speed, in the speed's unit."""
    whole = StageSeconds()
    for layer in layers[stage.first_layer : stage.last_layer]:
        whole = whole.plus(_layer_seconds(layer, speed))
    return whole.plus(_head_seconds(head, speed)) if stage.has_head else whole


def _layer_seconds(layer: LayerCost, speed: DeviceSpeed) -> StageSeconds:
    return StageSeconds(layer.weight_bytes * speed.layer_prompt_s, layer.weight_bytes * speed.layer_decode_s)


def _head_seconds(head: LayerCost, speed: DeviceSpeed) -> StageSeconds:
    return StageSeconds(head.weight_bytes * speed.head_prompt_s, head.weight_bytes * speed.head_decode_s)


@dataclass(frozen=True, slots=True)
class _Items:
    """What is given out in order, the head last: bytes, and seconds by device."""

    memory_bytes: Sequence[int]
    seconds: Sequence[Sequence[StageSeconds]]

    def slowest(self, counts: Sequence[int]) -> StageSeconds:
        """The slowest stage's times, each kind by itself."""
        prompt_s = decode_s = 0.0
        first = 0
        for seconds, count in zip(self.seconds, counts, strict=True):
            run = seconds[first : first + count]
            prompt_s = max(prompt_s, sum(item.prompt_s for item in run))
            decode_s = max(decode_s, sum(item.decode_s for item in run))
            first += count
        return StageSeconds(prompt_s, decode_s)


def _by_slowest_stage(costs: Sequence[LayerCost], devices: Sequence[DeviceBudget], tune: Tune) -> list[int]:
    """Counts per device for which prompt and decode tokens, in the shares of `tune`, take least; `costs` ends with the
    head, and each kind's time is its slowest stage's.

    Of all placements with the fastest prompts, then of those that are better for decode, and so on, the best is kept:
    no other trade of the two can be better than all of these.
    """
    seconds = [[_tuned(item, tune) for item in _seconds_of(costs, device.speed)] for device in devices]
    items = _Items([cost.memory_bytes for cost in costs], seconds)
    prompt_share, decode_share = _SHARES[tune]
    best: list[int] | None = None
    best_s = decode_limit_s = float("inf")
    for _ in range(_MAX_TRADES):
        counts = _fastest_prompts(items, devices, decode_limit_s)
        if counts is None:
            break
        slowest = items.slowest(counts)
        whole_s = prompt_share * slowest.prompt_s + decode_share * slowest.decode_s
        if best is None or whole_s < best_s:
            best, best_s = counts, whole_s
        if not decode_share or prompt_share * slowest.prompt_s >= best_s:  # from here on prompts alone take longer
            break
        decode_limit_s = slowest.decode_s * (1 - 1e-9)
    if best is None:
        raise _does_not_fit(costs, devices)
    return best


def _seconds_of(costs: Sequence[LayerCost], speed: DeviceSpeed) -> list[StageSeconds]:
    return [*(_layer_seconds(cost, speed) for cost in costs[:-1]), _head_seconds(costs[-1], speed)]


def _tuned(seconds: StageSeconds, tune: Tune) -> StageSeconds:
    """What goes first for `tune`: decode in the place of prompts where nothing else counts."""
    return StageSeconds(seconds.decode_s, seconds.decode_s) if tune is Tune.DECODE else seconds


def _fastest_prompts(items: _Items, devices: Sequence[DeviceBudget], decode_limit_s: float) -> list[int] | None:
    """Counts with the fastest slowest stage in prompts of those within memory and the limit for decode.

    Filling each device as far as the limits and its memory allow is optimal for those limits, since runs are
    contiguous and taking a layer earlier never hurts those behind; so the best limit is found by halving.
    """
    high = max(sum(item.prompt_s for item in seconds) for seconds in items.seconds)
    best = _fill(items, devices, StageSeconds(high, decode_limit_s))
    if best is None:
        return None
    low = 0.0
    for _ in range(_SEARCH_STEPS):
        limit = (low + high) / 2
        counts = _fill(items, devices, StageSeconds(limit, decode_limit_s))
        if counts is None:
            low = limit
        else:
            high, best = limit, counts
    return best


def _fill(items: _Items, devices: Sequence[DeviceBudget], limits: StageSeconds) -> list[int] | None:
    counts: list[int] = []
    at, n_items = 0, len(items.memory_bytes)
    for device, seconds in zip(devices, items.seconds, strict=True):
        used_bytes, prompt_s, decode_s, count = 0, 0.0, 0.0, 0
        while at < n_items:
            used_bytes += items.memory_bytes[at]
            prompt_s += seconds[at].prompt_s
            decode_s += seconds[at].decode_s
            if used_bytes > device.usable_bytes or prompt_s > limits.prompt_s or decode_s > limits.decode_s:
                break
            count += 1
            at += 1
        counts.append(count)
    return counts if at == n_items else None


def offers(devices: Sequence[DeviceBudget]) -> str:
    """What each device has to give, in words."""
    return ", ".join(
        f"{device.name} {mib(device.free_bytes)} free less {mib(device.reserve_bytes)} of compute buffers"
        for device in devices
    )


def _does_not_fit(items: Sequence[LayerCost], devices: Sequence[DeviceBudget]) -> DoesNotFit:
    """The largest run a device can hold may be less than its memory: layers are never cut."""
    needed_bytes = sum(item.memory_bytes for item in items)
    return DoesNotFit(needed_bytes, sum(device.usable_bytes for device in devices), offers(devices))


def _check_memory(
    stages: Sequence[StageRange], layers: Sequence[LayerCost], head: LayerCost, devices: Sequence[DeviceBudget]
) -> None:
    for stage in stages:
        needed_bytes = sum(layer.memory_bytes for layer in layers[stage.first_layer : stage.last_layer])
        needed_bytes += head.memory_bytes if stage.has_head else 0
        device = devices[stage.device]
        if device.usable_bytes < needed_bytes:
            raise OutOfDeviceMemory(device.name, needed_bytes, device.usable_bytes)
