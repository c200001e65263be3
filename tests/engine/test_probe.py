"""Devices are measured before anything is placed; how fast they are is given here, on a clock of the test's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.engine import probe
from app.engine.device import Handle
from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import PlannedStage, plan_stages
from app.engine.models import registry
from app.engine.models.base import Model
from app.engine.placement import DeviceSpeed, Tune
from app.engine.stage import StageLimits
from tests.fakes.architectures import RECIPES, write_model
from tests.fakes.gguf import TinyLlama, write_tiny_llama

LIMITS = StageLimits(
    max_tokens=64, max_outputs=16, max_seqs=4, n_cells=512, n_snapshots=2,
    key_type=GGMLType.F32, value_type=GGMLType.F32,
)  # fmt: skip


@dataclass(slots=True)
class Clock:
    """Stands still but for what devices add."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(NumpyDevice):
    """Takes so long for each layer and row, and for the head and row, on the test's clock."""

    def __init__(self, clock: Clock, layer_row_s: float, head_row_s: float = 0.0) -> None:
        super().__init__(f"{layer_row_s:g}", n_threads=1)
        self._clock = clock
        self._layer_row_s, self._head_row_s = layer_row_s, head_row_s
        self.n_rows: list[int] = []

    def run(self, handle: Handle) -> None:
        named = re.match(r"l(\d+)-(\d+) t(\d+) kv\d+ o(\d+)", handle.program_name)
        assert named is not None
        first, last, n_tokens, n_outputs = map(int, named.groups())
        row_s = (last - first) * n_tokens * self._layer_row_s or n_outputs * self._head_row_s
        self.n_rows.append(n_tokens)
        self._take(row_s, handle)

    def _take(self, row_s: float, handle: Handle) -> None:
        def take_time() -> None:
            self._clock.now_s += row_s

        self._lane.submit(take_time)
        super().run(handle)
        self.synchronize()  # the clock is read when this ubatch is done, not when those behind it are


class Lumped(Timed):
    """Ends of ubatches are noticed when all that were submitted have taken their time."""

    def _take(self, row_s: float, handle: Handle) -> None:
        self._clock.now_s += row_s
        NumpyDevice.run(self, handle)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = write_tiny_llama(tmp_path_factory.mktemp("probe") / "tiny.gguf", TinyLlama(n_layers=12))
    return registry.load(GGUFFile.open(path))


@pytest.fixture
def opened() -> Iterator[list[NumpyDevice]]:
    devices: list[NumpyDevice] = []
    yield devices
    for device in devices:
        device.close()


def placed(model: Model, devices: Sequence[NumpyDevice], speeds: list[DeviceSpeed] | None, tune: Tune) -> list[int]:
    stages: list[PlannedStage] = plan_stages(model, devices, LIMITS, speeds=speeds, tune=tune)
    return [stage.shape.last_layer - stage.shape.first_layer for stage in stages]


def test_layers_are_shared_by_measured_speed(model: Model, opened: list[NumpyDevice]) -> None:
    clock = Clock()
    opened += [Timed(clock, 1e-5), Timed(clock, 2e-5)]
    speeds = probe.measure(model, opened, LIMITS, clock)
    assert speeds is not None
    assert speeds[1].layer_prompt_s == pytest.approx(2 * speeds[0].layer_prompt_s)
    assert speeds[1].layer_decode_s == pytest.approx(2 * speeds[0].layer_decode_s)
    assert placed(model, opened, speeds, Tune.PROMPT) == [8, 4]
    assert placed(model, opened, None, Tune.PROMPT) == [6, 6]


def test_a_dear_head_moves_layers_away_from_it_for_decode_alone(model: Model, opened: list[NumpyDevice]) -> None:
    clock = Clock()
    opened += [Timed(clock, 1e-5, 4e-5), Timed(clock, 1e-5, 4e-5)]
    speeds = probe.measure(model, opened, LIMITS, clock)
    assert placed(model, opened, speeds, Tune.PROMPT) == [6, 6]
    assert placed(model, opened, speeds, Tune.DECODE) == [8, 4]


def test_a_head_whose_ends_are_noticed_together_takes_its_time_all_the_same(
    model: Model, opened: list[NumpyDevice]
) -> None:
    clock = Clock()
    opened += [Lumped(clock, 1e-5, 4e-5), Lumped(clock, 1e-5, 4e-5)]
    speeds = probe.measure(model, opened, LIMITS, clock)
    assert placed(model, opened, speeds, Tune.DECODE) == [8, 4]


def test_stages_tell_what_they_were_measured_to_take(model: Model, opened: list[NumpyDevice]) -> None:
    clock = Clock()
    opened += [Timed(clock, 1e-5, 4e-5), Timed(clock, 1e-5, 4e-5)]
    speeds = probe.measure(model, opened, LIMITS, clock)
    first, second = plan_stages(model, opened, LIMITS, speeds=speeds, tune=Tune.DECODE)
    assert first.seconds is not None and second.seconds is not None
    assert first.seconds.prompt_s == pytest.approx(8e-5)
    assert first.seconds.decode_s == pytest.approx(8e-5)
    assert second.seconds.decode_s == pytest.approx(8e-5)
    (planned, *_) = plan_stages(model, opened, LIMITS)
    assert planned.seconds is None


def test_devices_that_hardly_differ_are_taken_to_be_equal(model: Model, opened: list[NumpyDevice]) -> None:
    clock = Clock()
    opened += [Timed(clock, 1e-5), Timed(clock, 1.15e-5), Timed(clock, 4e-5)]
    speeds = probe.measure(model, opened, LIMITS, clock)
    assert speeds is not None
    assert speeds[0].layer_prompt_s == speeds[1].layer_prompt_s < speeds[2].layer_prompt_s
    assert placed(model, opened[:2], speeds[:2], Tune.PROMPT) == [6, 6]


class Hasty(Timed):
    """One end of a head is noticed late, together with those behind it: once, and the head seems to cost nothing."""

    n_heads = 0

    def run(self, handle: Handle) -> None:
        usual_s = self._head_row_s
        if handle.program_name.startswith("l12-12 "):
            self.n_heads += 1
            self._head_row_s = usual_s * {7: 4, 8: 0, 9: 0, 10: 0}.get(self.n_heads, 1)
        super().run(handle)
        self._head_row_s = usual_s


def test_a_time_that_is_far_too_short_moves_no_layer(model: Model, opened: list[NumpyDevice]) -> None:
    clock = Clock()
    opened += [Hasty(clock, 1e-5, 4e-5), Hasty(clock, 1e-5, 4e-5)]
    speeds = probe.measure(model, opened, LIMITS, clock)
    assert placed(model, opened, speeds, Tune.DECODE) == [8, 4]


def test_the_budget_bounds_what_a_slow_device_is_asked(model: Model, opened: list[NumpyDevice]) -> None:
    clock = Clock()
    opened += [Timed(clock, 2e-3), Timed(clock, 1e-9)]
    assert probe.measure(model, opened, LIMITS, clock) is not None
    slow, fast = opened
    assert isinstance(slow, Timed) and isinstance(fast, Timed)
    assert max(slow.n_rows) == max(fast.n_rows) == 8  # the same for both: few rows cost more each than many
    assert clock.now_s < 3.0
    fast.n_rows.clear()
    assert probe.measure(model, [fast], LIMITS, clock) is not None
    assert max(fast.n_rows) == 64


def test_devices_keep_nothing(model: Model, opened: list[NumpyDevice]) -> None:
    opened += [NumpyDevice("A", memory_limit_bytes=64 << 20)]
    before = opened[0].memory()
    probe.measure(model, opened, LIMITS)
    assert opened[0].memory() == before


def test_without_memory_to_measure_nothing_is_known(model: Model, opened: list[NumpyDevice]) -> None:
    opened += [NumpyDevice("A", memory_limit_bytes=4096)]
    assert probe.measure(model, opened, LIMITS) is None


@pytest.mark.parametrize("architecture", sorted(RECIPES))
def test_every_architecture_can_be_measured(architecture: str, tmp_path: Path, opened: list[NumpyDevice]) -> None:
    model = registry.load(GGUFFile.open(write_model(tmp_path / "model.gguf", architecture)))
    opened += [NumpyDevice("A", n_threads=1)]
    speeds = probe.measure(model, opened, LIMITS)
    assert speeds is not None
    (speed,) = speeds
    assert min(speed.layer_prompt_s, speed.layer_decode_s, speed.head_prompt_s, speed.head_decode_s) > 0
