"""Sizes: the automatic context, the largest that fits, and snapshots of recurrent state beside it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.buckets import KV_STEP_CELLS, bucket, kv_bucket
from app.engine.devices.numpy import NumpyDevice
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import plan_stages
from app.engine.models import registry
from app.engine.models.base import Model
from app.engine.serving.types import BLOCK_CELLS
from app.engine.sizing import STEP_CELLS, Sizes, SizeWishes, choose_sizes, largest_of, largest_that_fits
from app.errors import ConfigError
from tests.fakes.architectures import KEY_HEADS, STATE, VALUE_HEADS, write_model
from tests.fakes.gguf import write_tiny_llama


@given(st.integers(STEP_CELLS, 1 << 20), st.integers(STEP_CELLS, 1 << 20))
def test_the_largest_step_that_fits_is_found(wanted: int, room: int) -> None:
    found = largest_that_fits(wanted, lambda cells: cells <= room)
    assert found == min(wanted, room) // STEP_CELLS * STEP_CELLS


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room .* that takes 3 MiB of 2"):
        largest_that_fits(4096, lambda _: False, "3 MiB of 2")


def test_no_room_for_the_least_context_names_devices_and_amounts(tmp_path: Path) -> None:
    model = registry.load(GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")))
    with pytest.raises(ConfigError, match="that takes 0.5 MiB with the model, where there are D 0.9 MiB free"):
        sizes_of(model, 1 << 20)


@given(st.integers(1, 600), st.integers(1, 512))
def test_buckets_hold_what_is_asked_and_waste_at_most_half(n: int, largest: int) -> None:
    size = bucket(n, largest)
    assert size >= n and (size <= largest or size == n)
    assert size <= max(1, 1.5 * n)


@given(st.integers(1, 1 << 20))
def test_programs_see_little_more_of_the_cache_than_they_must(n_cells: int) -> None:
    seen = kv_bucket(n_cells)
    assert n_cells <= seen < n_cells + max(KV_STEP_CELLS, n_cells / 4)
    assert seen % KV_STEP_CELLS == 0


def test_long_contexts_need_few_programs() -> None:
    assert [kv_bucket(n) for n in (1, 256, 257, 2048, 2049, 4096, 4097)] == [256, 256, 512, 2048, 2560, 4096, 5120]
    assert len({kv_bucket(n) for n in range(1, 1 << 17)}) == 32


@given(st.integers(0, 500), st.integers(0, 500))
def test_the_largest_number_that_fits_is_found(most: int, room: int) -> None:
    assert largest_of(most, lambda n: n <= room) == min(most, room)


# --- snapshots of recurrent state ---


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = write_model(tmp_path_factory.mktemp("sizing") / "next.gguf", "qwen3next")
    return registry.load(GGUFFile.open(path))


def sizes_of(model: Model, memory_bytes: int | None = None, **wishes: object) -> Sizes:
    asked = {
        "ctx_size": 0,
        "n_slots": 2,
        "n_ubatch": 64,
        "max_queue": 4,
        "cache_prompts": True,
        "key_type": "f16",
        "value_type": "f16",
        "snapshot_budget_bytes": 64 << 20,
        **wishes,
    }
    with closing(NumpyDevice("D", memory_limit_bytes=memory_bytes)) as device:
        return choose_sizes(model, [device], SizeWishes(**asked))  # type: ignore[arg-type]


def test_a_snapshot_is_the_state_of_all_layers(hybrid: Model) -> None:
    per_layer = 4 * (3 * (2 * KEY_HEADS + VALUE_HEADS) * STATE + VALUE_HEADS * STATE * STATE)
    sizes = sizes_of(hybrid, ctx_size=2048, snapshot_budget_bytes=10 * 2 * per_layer + 1)
    assert sizes.scheduler.snapshot_bytes == 2 * per_layer  # two of four layers are recurrent
    assert sizes.scheduler.n_snapshots == sizes.limits.n_snapshots == 10
    assert sizes.limits.n_state_rows == 2 + 1 + 10


def test_snapshots_keep_to_budget_blocks_and_wishes(hybrid: Model) -> None:
    assert sizes_of(hybrid, ctx_size=512).limits.n_snapshots == 512 // BLOCK_CELLS
    assert sizes_of(hybrid, ctx_size=512, snapshot_budget_bytes=0).limits.n_snapshots == 0
    assert sizes_of(hybrid, ctx_size=512, cache_prompts=False).limits.n_snapshots == 0


def test_models_without_state_have_none(tmp_path: Path) -> None:
    model = registry.load(GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")))
    sizes = sizes_of(model, ctx_size=512)
    assert (sizes.scheduler.snapshot_bytes, sizes.limits.n_snapshots) == (0, 0)


def test_scarce_memory_takes_snapshots_before_an_asked_context(hybrid: Model) -> None:
    """An explicit context stands; snapshots take what is left, with a tenth to spare."""
    full = sizes_of(hybrid, ctx_size=2048)
    needed = _needed_bytes(hybrid, full)
    some = sizes_of(hybrid, int(needed / 0.9) - 5 * full.scheduler.snapshot_bytes, ctx_size=2048)
    assert some.scheduler.n_ctx == 2048
    assert full.limits.n_snapshots - 8 <= some.limits.n_snapshots < full.limits.n_snapshots
    none = sizes_of(hybrid, needed // 2, ctx_size=2048)
    assert none.limits.n_snapshots == 0


def test_snapshots_take_at_most_a_quarter_of_an_automatic_context(hybrid: Model) -> None:
    full = _needed_bytes(hybrid, sizes_of(hybrid, snapshot_budget_bytes=0))
    memory = int(full / 0.9) - (200 << 10)
    without = sizes_of(hybrid, memory, snapshot_budget_bytes=0)
    sizes = sizes_of(hybrid, memory)
    assert 0 < sizes.limits.n_snapshots
    assert 0.7 * without.limits.n_cells <= sizes.limits.n_cells < without.limits.n_cells < 2 * 2048
    assert _needed_bytes(hybrid, sizes) <= 0.9 * memory
    roomy = sizes_of(hybrid)
    assert roomy.limits.n_snapshots == 2 * 2048 // BLOCK_CELLS
    assert roomy.scheduler.n_ctx == 2048 and roomy.limits.n_cells > 2 * 2048


def _needed_bytes(model: Model, sizes: Sizes) -> int:
    with closing(NumpyDevice("D", memory_limit_bytes=1 << 30)) as device:
        (planned,) = plan_stages(model, [device], sizes.limits)
        return planned.total_bytes
