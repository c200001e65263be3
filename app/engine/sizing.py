"""How large everything is: the cells all slots share, the most one sequence may hold, and the largest ubatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.engine.device import Device
from app.engine.ggml import GGMLType
from app.engine.loader import device_budgets, place_layers
from app.engine.models.base import Model
from app.engine.serving.types import BLOCK_CELLS, SchedulerConfig
from app.engine.stage import StageLimits
from app.errors import ConfigError, OutOfDeviceMemory

#: Cells come in these steps, which are also those in which attention looks at the cache.
STEP_CELLS = 256
#: Rows of one ubatch that may need logits; more are spread over several ubatches.
MAX_OUTPUTS = 64
#: What an automatic context leaves free on every device.
SPARE = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the scheduler and the stages are built for; the two agree."""

    scheduler: SchedulerConfig
    limits: StageLimits


def choose_sizes(
    model: Model,
    devices: Sequence[Device],
    *,
    ctx_size: int,
    n_slots: int,
    n_ubatch: int,
    max_queue: int,
    cache_prompts: bool,
    key_type: str,
    value_type: str,
    tensor_split: Sequence[float] | None,
) -> Sizes:
    """Sizes for a model on these devices.

    `ctx_size` 0: the model's context for every slot, or what fits with a tenth to spare, whichever is less.
    Raises ConfigError or OutOfDeviceMemory.
    """

    def sizes(n_cells: int) -> Sizes:
        return _sizes(model, n_cells, n_slots, n_ubatch, max_queue, cache_prompts, key_type, value_type)

    if ctx_size:
        return sizes(max(STEP_CELLS, ctx_size))
    wanted = model.n_ctx_train * n_slots
    budgets = device_budgets(model, devices, sizes(max(STEP_CELLS, wanted)).limits, SPARE)

    def fits(n_cells: int) -> bool:
        try:
            place_layers(model, sizes(n_cells).limits, budgets, tensor_split)
        except OutOfDeviceMemory:
            return False
        return True

    return sizes(largest_that_fits(max(STEP_CELLS, wanted), fits))


def _sizes(
    model: Model,
    n_cells: int,
    n_slots: int,
    n_ubatch: int,
    max_queue: int,
    cache_prompts: bool,
    key_type: str,
    value_type: str,
) -> Sizes:
    n_blocks = -(-n_cells // BLOCK_CELLS)
    scheduler = SchedulerConfig(
        n_slots=n_slots,
        n_blocks=n_blocks,
        n_ctx=min(model.n_ctx_train, n_cells),
        n_ubatch=n_ubatch,
        max_queue=max_queue,
        max_outputs=min(MAX_OUTPUTS, n_ubatch),
        cache_prompts=cache_prompts,
        equal_lengths=model.has_state,
        recurrent=model.has_state,
    )
    limits = StageLimits(
        max_tokens=n_ubatch,
        max_outputs=scheduler.max_outputs,
        max_seqs=n_slots,
        n_cells=-(-scheduler.n_cells // STEP_CELLS) * STEP_CELLS,
        n_state_rows=n_slots + 1 + scheduler.n_snapshots,
        key_type=_cache_type("--cache-type-k", key_type),
        value_type=_cache_type("--cache-type-v", value_type),
    )
    return Sizes(scheduler, limits)


def _cache_type(flag: str, name: str) -> GGMLType:
    try:
        return GGMLType[name.upper()]
    except KeyError:
        raise ConfigError(f"{flag} {name!r} is not a tensor type") from None


def largest_that_fits(wanted_cells: int, fits: Callable[[int], bool]) -> int:
    """The largest multiple of the step up to `wanted_cells` for which `fits` holds; smaller ones fit if larger do.

    Raises ConfigError when not even one step fits.
    """
    steps = wanted_cells // STEP_CELLS
    if fits(steps * STEP_CELLS):
        return steps * STEP_CELLS
    low, high = 0, steps  # low fits (nothing), high does not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * STEP_CELLS):
            low = middle
        else:
            high = middle
    if low == 0:
        raise ConfigError(
            f"the devices have no room for a context of even {STEP_CELLS} tokens beside the model; "
            f"add devices, free memory on them, or choose a smaller quantization"
        )
    return low * STEP_CELLS
