"""How large everything is: the cells all slots share, the most one sequence may hold, the largest ubatch, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.engine.device import Device
from app.engine.ggml import GGMLType
from app.engine.loader import device_budgets, layers_fit, needed_bytes
from app.engine.models.base import Model
from app.engine.placement import offers
from app.engine.serving.types import BLOCK_CELLS, SchedulerConfig
from app.engine.stage import StageLimits
from app.engine.states import state_row_bytes
from app.errors import ConfigError
from app.units import mib

#: Cells come in these steps, which are also those in which attention looks at the cache.
STEP_CELLS = 256
#: Rows of one ubatch that may need logits; more are spread over several ubatches.
MAX_OUTPUTS = 64
#: What an automatic context and snapshots leave free on every device.
SPARE = 0.1
#: The part of an automatic context that snapshots may not take away.
CONTEXT_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeWishes:
    """What the user asked for.

    `ctx_size` 0: the model's context for every slot, or what fits with a tenth to spare, whichever is less.
    `snapshot_budget_bytes`: the most that snapshots of recurrent state may take on all devices together.
    """

    ctx_size: int
    n_slots: int
    n_ubatch: int
    max_queue: int
    cache_prompts: bool
    key_type: str
    value_type: str
    tensor_split: Sequence[float] | None = None
    snapshot_budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the scheduler and the stages are built for; the two agree."""

    scheduler: SchedulerConfig
    limits: StageLimits


def choose_sizes(model: Model, devices: Sequence[Device], wishes: SizeWishes) -> Sizes:
    """Sizes for a model on these devices. Raises ConfigError or OutOfDeviceMemory."""
    wanted_cells = max(STEP_CELLS, wishes.ctx_size or model.n_ctx_train * wishes.n_slots)
    n_wanted = _n_wanted_snapshots(model, wanted_cells, wishes)
    if wishes.ctx_size and not n_wanted:
        return _sizes(model, wanted_cells, 0, wishes)
    largest = _sizes(model, wanted_cells, 0, wishes)
    budgets = device_budgets(model, devices, largest.limits, SPARE)

    def fits(n_cells: int, n_snapshots: int) -> bool:
        limits = _sizes(model, n_cells, n_snapshots, wishes).limits
        return layers_fit(model, limits, budgets, wishes.tensor_split)

    if wishes.ctx_size:
        return _sizes(model, wanted_cells, largest_of(n_wanted, lambda n: fits(wanted_cells, n)), wishes)
    least_bytes = needed_bytes(model, _sizes(model, STEP_CELLS, 0, wishes).limits)
    what = f"{mib(least_bytes)} with the model, where there are {offers(budgets)}, with {SPARE:.0%} left to spare"
    n_cells = largest_that_fits(wanted_cells, lambda n: fits(n, 0), what)
    least_cells = max(STEP_CELLS, int(n_cells * CONTEXT_SHARE))
    n_snapshots = largest_of(n_wanted, lambda n: fits(least_cells, n))
    return _sizes(model, largest_that_fits(n_cells, lambda n: fits(n, n_snapshots)), n_snapshots, wishes)


def _n_wanted_snapshots(model: Model, n_cells: int, wishes: SizeWishes) -> int:
    """As many as the budget holds, but no more than one per block: each stands for a prefix that is in the cache."""
    snapshot_bytes = state_row_bytes(model.caches())
    if not snapshot_bytes or not wishes.cache_prompts:
        return 0
    return min(wishes.snapshot_budget_bytes // snapshot_bytes, n_cells // BLOCK_CELLS)


def _sizes(model: Model, n_cells: int, n_snapshots: int, wishes: SizeWishes) -> Sizes:
    snapshot_bytes = state_row_bytes(model.caches())
    scheduler = SchedulerConfig(
        n_slots=wishes.n_slots,
        n_blocks=-(-n_cells // BLOCK_CELLS),
        n_ctx=min(model.n_ctx_train, n_cells),
        n_ubatch=wishes.n_ubatch,
        max_queue=wishes.max_queue,
        max_outputs=min(MAX_OUTPUTS, wishes.n_ubatch),
        cache_prompts=wishes.cache_prompts,
        equal_lengths=model.has_state,
        recurrent=model.has_state,
        snapshot_bytes=snapshot_bytes,
        snapshot_budget_bytes=n_snapshots * snapshot_bytes,
    )
    limits = StageLimits(
        max_tokens=wishes.n_ubatch,
        max_outputs=scheduler.max_outputs,
        max_seqs=wishes.n_slots,
        n_cells=-(-scheduler.n_cells // STEP_CELLS) * STEP_CELLS,
        n_snapshots=scheduler.n_snapshots,
        key_type=_cache_type("--cache-type-k", wishes.key_type),
        value_type=_cache_type("--cache-type-v", wishes.value_type),
    )
    return Sizes(scheduler, limits)


def _cache_type(flag: str, name: str) -> GGMLType:
    try:
        return GGMLType[name.upper()]
    except KeyError:
        raise ConfigError(f"{flag} {name!r} is not a tensor type") from None


def largest_of(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of 0 .. most that fits; 0 is taken to fit, and smaller ones fit if larger do."""
    low, high = 0, most + 1
    if most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def largest_that_fits(wanted_cells: int, fits: Callable[[int], bool], least: str = "too much") -> int:
    """The largest multiple of the step up to `wanted_cells` for which `fits` holds; smaller ones fit if larger do.

    Raises ConfigError when not even one step fits; `least` says what that would take, and of what.
    """
    steps = largest_of(wanted_cells // STEP_CELLS, lambda n: fits(n * STEP_CELLS))
    if steps == 0:
        raise ConfigError(
            f"the devices have no room for a context of even {STEP_CELLS} tokens: that takes {least}; "
            f"add devices, free memory on them, or choose a smaller quantization"
        )
    return steps * STEP_CELLS
