"""Placement: every layer exactly once, within memory, and no split with a faster slowest stage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.placement import DeviceBudget, DeviceSpeed, LayerCost, StageRange, Tune, fits, place, stage_seconds
from app.errors import ConfigError, OutOfDeviceMemory

COSTS = st.builds(LayerCost, weight_bytes=st.integers(1, 1000), cache_bytes=st.integers(0, 300))
SPEEDS = st.sampled_from([0.5, 1.0, 1.0, 2.0, 7.0])


def devices_of(free: list[int], speeds: list[float] | None = None) -> list[DeviceBudget]:
    pairs = itertools.zip_longest(free, speeds or [1.0] * len(free), fillvalue=1.0)
    return [
        DeviceBudget(name=f"D{i}", free_bytes=int(f), speed=DeviceSpeed().times(s)) for i, (f, s) in enumerate(pairs)
    ]


def check_covers(stages: list[StageRange], n_layers: int, n_devices: int) -> None:
    covered = [layer for stage in stages for layer in range(stage.first_layer, stage.last_layer)]
    assert covered == list(range(n_layers))
    assert [stage.has_head for stage in stages] == [False] * (len(stages) - 1) + [True]
    numbers = [stage.device for stage in stages]
    assert numbers == sorted(set(numbers)) and set(numbers) <= set(range(n_devices))
    assert all(stage.n_layers > 0 or stage.has_head for stage in stages)


#: What a placement is worth for each tune: shares of the slowest stage's time for prompts and for decode.
SHARES = {Tune.PROMPT: (1, 0), Tune.DECODE: (0, 1), Tune.AUTO: (8, 1)}


def worth_s(
    stages: list[StageRange], layers: list[LayerCost], head: LayerCost, devices: list[DeviceBudget], tune: Tune
) -> float:
    times = [stage_seconds(stage, layers, head, devices[stage.device].speed) for stage in stages]
    prompt, decode = SHARES[tune]
    return prompt * max(t.prompt_s for t in times) + decode * max(t.decode_s for t in times)


@settings(max_examples=150, deadline=None)
@given(st.lists(COSTS, min_size=1, max_size=40), COSTS, st.lists(SPEEDS, min_size=1, max_size=6))
def test_every_layer_stands_exactly_once(layers: list[LayerCost], head: LayerCost, speeds: list[float]) -> None:
    devices = devices_of([10**9] * len(speeds), speeds)
    check_covers(place(layers, head, devices), len(layers), len(devices))


KINDS = st.builds(
    DeviceSpeed,
    layer_prompt_s=SPEEDS,
    layer_decode_s=SPEEDS,
    head_prompt_s=st.sampled_from([0.01, 1.0]),
    head_decode_s=SPEEDS,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(COSTS, min_size=1, max_size=6),
    COSTS,
    st.lists(st.tuples(st.integers(0, 4000), KINDS), min_size=1, max_size=3),
    st.sampled_from(Tune),
)
def test_no_other_split_within_memory_is_faster(
    layers: list[LayerCost], head: LayerCost, offers: list[tuple[int, DeviceSpeed]], tune: Tune
) -> None:
    devices = [DeviceBudget(name=f"D{i}", free_bytes=f, speed=speed) for i, (f, speed) in enumerate(offers)]
    items = [*layers, head]
    best = None
    for cuts in itertools.combinations_with_replacement(range(len(items) + 1), len(devices) - 1):
        edges = (0, *cuts, len(items))
        ranges = [
            StageRange(i, a, min(b, len(layers)), b == len(items) > a)
            for i, (a, b) in enumerate(itertools.pairwise(edges))
        ]
        runs = [items[a:b] for a, b in itertools.pairwise(edges)]
        if all(sum(i.memory_bytes for i in run) <= d.usable_bytes for run, d in zip(runs, devices, strict=True)):
            time_s = worth_s(ranges, layers, head, devices, tune)
            best = time_s if best is None else min(best, time_s)
    assert fits(layers, head, devices) == (best is not None)
    if best is None:
        with pytest.raises(OutOfDeviceMemory):
            place(layers, head, devices, tune=tune)
        return
    stages = place(layers, head, devices, tune=tune)
    check_covers(stages, len(layers), len(devices))
    assert worth_s(stages, layers, head, devices, tune) == pytest.approx(best)


def test_prompts_hardly_feel_the_head_and_decode_does() -> None:
    layers, head = [LayerCost(weight_bytes=10)] * 30, LayerCost(weight_bytes=120)
    devices = devices_of([10**6, 10**6])
    first = {tune: place(layers, head, devices, tune=tune)[0].n_layers for tune in Tune}
    assert first == {Tune.PROMPT: 15, Tune.DECODE: 21, Tune.AUTO: 15}


def test_a_device_twice_as_fast_gets_twice_the_layers() -> None:
    layers, head = [LayerCost(weight_bytes=10)] * 30, LayerCost(weight_bytes=1)
    stages = place(layers, head, devices_of([10**6, 10**6], [1.0, 2.0]), tune=Tune.PROMPT)
    assert [stage.n_layers for stage in stages] == [20, 10]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 80),
    st.lists(st.floats(0, 10), min_size=1, max_size=8).filter(lambda split: sum(split) > 0.01),
)
def test_proportions_cover_every_layer(n_layers: int, split: list[float]) -> None:
    layers = [LayerCost(weight_bytes=10)] * n_layers
    stages = place(layers, LayerCost(weight_bytes=10), devices_of([10**6] * len(split)), split)
    check_covers(stages, n_layers, len(split))
    for stage in stages:
        if stage.n_layers:
            share = split[stage.device] / sum(split) * n_layers
            assert abs(stage.n_layers - share) <= 1


def test_a_device_without_free_memory_gets_nothing() -> None:
    layers = [LayerCost(weight_bytes=10)] * 4
    stages = place(layers, LayerCost(weight_bytes=10), devices_of([0, 1000, 0]))
    assert stages == [StageRange(1, 0, 4, True)]


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    layers = [LayerCost(weight_bytes=100, cache_bytes=50)] * 4
    with pytest.raises(OutOfDeviceMemory, match="needs 700 bytes.*offer 500 bytes .D0 250 bytes free") as caught:
        place(layers, LayerCost(weight_bytes=100), devices_of([250, 250]))
    assert caught.value.needed_bytes == 700
    with pytest.raises(OutOfDeviceMemory, match="D1"):
        place(layers, LayerCost(weight_bytes=100), devices_of([10**6, 250]), [1, 1])
    assert not fits(layers, LayerCost(weight_bytes=100), devices_of([10**6, 250]), [1, 1])
    assert fits(layers, LayerCost(weight_bytes=100), devices_of([10**6, 10**6]), [1, 1])


@pytest.mark.parametrize("split", [[1.0], [1.0, 2.0, 3.0], [0.0, 0.0], [-1.0, 2.0]])
def test_a_split_that_makes_no_sense_is_refused(split: list[float]) -> None:
    with pytest.raises(ConfigError, match="tensor-split"):
        place([LayerCost(weight_bytes=1)] * 4, LayerCost(weight_bytes=1), devices_of([100, 100]), split)


def test_no_device_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rpc"):
        place([LayerCost(weight_bytes=1)], LayerCost(weight_bytes=1), [])
