"""What the scheduler says to the step loop and back: settings, ubatches, device work in order, and endings.

Plain data. A *cell* is one token's place in every layer's KV cache, a *block* is 64 aligned cells, a *slot* is the
place of one running request (and its row of recurrent state, if the model has any).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from app.engine.request import FinishReason
from app.errors import ConfigError

#: Cells in a block. Attention kernels walk the cache in aligned blocks of this many cells.
BLOCK_CELLS = 64


def blocks_for(n_tokens: int) -> int:
    """How many blocks hold `n_tokens` positions."""
    return -(-n_tokens // BLOCK_CELLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and rules the scheduler keeps; fixed for its life.

    `n_ctx` is the most tokens one sequence may hold (prompt and answer), `n_blocks` the usable blocks of the shared
    pool (the scratch block comes on top), `n_ubatch` the most rows of one ubatch, `max_outputs` the most rows of one
    ubatch that may need logits (0: as many as rows).
    `equal_lengths`: every sequence of a ubatch has the same number of rows, so decode and prompts never mix.
    `recurrent`: the model keeps per-slot state that cannot rewind. A snapshot of it takes `snapshot_bytes`; as many as
    fit into `snapshot_budget_bytes` are kept: where an answer starts and where it ended, at the prompt's end minus one,
    every `snapshot_interval_tokens`, and at starts of other messages at least `snapshot_spacing_tokens` apart.
    `hold_tokens`: a waiting request is held back while a running one is about to compute at least this many more tokens
    of its prompt than the cache already has.
    """

    n_slots: int
    n_blocks: int
    n_ctx: int
    n_ubatch: int = 512
    max_queue: int = 64
    max_outputs: int = 0
    cache_prompts: bool = True
    equal_lengths: bool = False
    recurrent: bool = False
    snapshot_bytes: int = 0
    snapshot_budget_bytes: int = 0
    snapshot_interval_tokens: int = 8192
    snapshot_spacing_tokens: int = 128
    hold_tokens: int = 32

    def __post_init__(self) -> None:
        least_one = ("n_slots", "n_blocks", "n_ctx", "n_ubatch", "snapshot_interval_tokens", "snapshot_spacing_tokens")
        for name in (*least_one, "hold_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("max_queue", "max_outputs", "snapshot_bytes", "snapshot_budget_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must not be negative")
        if self.n_ctx < 2:
            raise ConfigError("n_ctx is 1, but a prompt token and an answer token need a context of at least 2")
        if blocks_for(self.n_ctx - 1) > self.n_blocks:
            raise ConfigError(
                f"one sequence may hold {self.n_ctx} tokens, but the cache has {self.n_blocks * BLOCK_CELLS} cells; "
                f"use a larger cache or a smaller context"
            )

    @property
    def n_snapshots(self) -> int:
        """How many snapshots the budget holds; their ids are 0 .. n_snapshots-1."""
        if not self.recurrent or self.snapshot_bytes == 0:
            return 0
        return self.snapshot_budget_bytes // self.snapshot_bytes

    @property
    def scratch_cell(self) -> int:
        """The KV row that padding rows (and rows whose KV is already there) write to; no sequence ever sees it."""
        return self.n_blocks * BLOCK_CELLS

    @property
    def n_cells(self) -> int:
        """Cells to allocate per cache: the pool and its scratch block."""
        return (self.n_blocks + 1) * BLOCK_CELLS

    @property
    def scratch_slot(self) -> int:
        """The state row for padding rows; recurrent states need n_slots + 1 rows."""
        return self.n_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one `schedule` call, never above the config's. None: the config's own.

    `n_tokens`: rows in all. `n_prompt`: prompt rows (the adaptive chunk size). `n_decode`: decode rows (the group size
    when several groups are in flight). Zero switches a kind off.
    """

    n_tokens: int | None = None
    n_prompt: int | None = None
    n_decode: int | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is to compute: prompts as (tokens not scheduled yet, tokens before them) in order of arrival, and
    sequences that decode, in flight or not; `n_ready` are those that are not."""

    prompts: tuple[tuple[int, int], ...]
    n_decoding: int
    n_ready: int = 0

    @property
    def n_prompt_tokens(self) -> int:
        return sum(n_left for n_left, _ in self.prompts)

    @property
    def is_scheduled(self) -> bool:
        """Whether all that can be computed now is in flight already."""
        return not self.prompts and not self.n_ready


@dataclass(frozen=True, slots=True)
class CopyCells:
    """Copy `n_cells` consecutive cells of every cache on every device. Source and target never overlap."""

    source_cell: int
    target_cell: int
    n_cells: int


class StateAction(Enum):
    """What happens to one slot's recurrent state."""

    CLEAR = "clear"  # zero the slot's row
    RESTORE = "restore"  # snapshot -> slot
    TAKE = "take"  # slot -> snapshot


@dataclass(frozen=True, slots=True)
class StateOp:
    """One move of recurrent state on every device that holds some. `snapshot` is -1 for CLEAR."""

    action: StateAction
    slot: int
    snapshot: int = -1


class OutputKind(Enum):
    """Why a row needs logits."""

    SAMPLE = "sample"  # the request's next token is drawn from them
    PROMPT_LOGPROB = "prompt_logprob"  # the log-probability of the known next prompt token is wanted


@dataclass(frozen=True, slots=True)
class Output:
    """A row that needs logits.

    `position` is that of the token the logits predict (the row's own position plus one): the absolute position the
    sampler's randomness is keyed with. `target` is the token standing there already, for PROMPT_LOGPROB (else -1).
    """

    row: int
    request_id: str
    kind: OutputKind
    position: int
    target: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class UbatchSequence:
    """One sequence's rows of a ubatch: rows [first_row, first_row + n_rows), positions from `first_position` upwards.

    `blocks` int32[k]: the sequence's block indices, strictly increasing; block j holds positions [64j, 64j+64). The row
    at position p sees the cells of positions 0..p and no others. The array is shared; do not write to it.
    """

    request_id: str
    slot: int
    first_row: int
    n_rows: int
    first_position: int
    blocks: NDArray[np.int32]
    is_decode: bool

    @property
    def n_visible(self) -> int:
        """Cells of this sequence that hold something once the ubatch has run."""
        return self.first_position + self.n_rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ubatch:
    """One pass through the model. Every ubatch handed out must be submitted to every lane, in order of `id`.

    In each lane, in this order: `copies` in list order, `before` in list order, the writes and the run, `after` in list
    order. Rows of one sequence are adjacent and ascend in position; with `equal_lengths` the layout is
    [sequence][token].

    tokens int32[n], positions int32[n], cells int64[n] (KV row each row is stored to; the scratch cell when the row's
    KV is in the cache already and only the recurrent state needs it), slots int32[n].
    `outputs` ascend by row. `started`: requests that got their slot with this ubatch for the first time.
    `follows`: the ubatch in flight whose samples are this one's tokens, which are zeros until those are drawn. Then the
    row of a request that has ended keeps its zero: what comes of it nobody sees.
    """

    id: int
    epoch: int
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    cells: NDArray[np.int64]
    slots: NDArray[np.int32]
    sequences: tuple[UbatchSequence, ...]
    outputs: tuple[Output, ...]
    copies: tuple[CopyCells, ...] = ()
    before: tuple[StateOp, ...] = ()
    after: tuple[StateOp, ...] = ()
    started: tuple[str, ...] = ()
    follows: int | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_decode(self) -> int:
        """Rows that are decode steps; the others are prompt rows."""
        return sum(s.n_rows for s in self.sequences if s.is_decode)

    @property
    def n_visible(self) -> int:
        """Cells that rows see, each row's counted: what attention has to do for each head and layer."""
        return int(self.positions.sum()) + len(self.positions)

    @property
    def n_kv(self) -> int:
        """Cells from the start of the cache that cover everything this ubatch's sequences see; a multiple of 64."""
        return BLOCK_CELLS * (1 + max(int(s.blocks[-1]) for s in self.sequences))


@dataclass(frozen=True, slots=True)
class Choice:
    """The token drawn for one SAMPLE output. `stop`: it ended the answer (end of generation, or a stop string)."""

    token: int
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a request stands.

    `processed_tokens` counts prompt tokens that are cached or committed. `completion_tokens` counts drawn tokens, a
    drawn end-of-generation token included. `slot` is -1 while it waits.
    """

    request_id: str
    slot: int
    prompt_tokens: int
    cached_tokens: int
    processed_tokens: int
    completion_tokens: int
    n_preemptions: int
    added_s: float
    started_s: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over: nothing of it is held any more."""

    request_id: str
    reason: FinishReason
    report: Report


@dataclass(slots=True)
class Counters:
    """Running totals since the start."""

    decode_rows: int = 0
    prompt_rows: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    rejected: int = 0
    ended: dict[FinishReason, int] = field(default_factory=dict)
