"""Which layers look through a sliding window."""

from __future__ import annotations

from app.engine.models.hparams import Keys

_PATTERN = "attention.sliding_window_pattern"


def windowed_layers(keys: Keys, n_blocks: int, default_period: int) -> tuple[bool, ...]:
    """Per block. The file has a flag per block, or a period: all but the last layer of each period are windowed.

    A period of 0 means every layer, 1 none.
    """
    if isinstance(keys.gguf.metadata.get(f"{keys.architecture}.{_PATTERN}"), list):
        return tuple(bool(flag) for flag in keys.per_block(_PATTERN, n_blocks))
    period = keys.integer(_PATTERN, default_period)
    return tuple(period == 0 or block % period < period - 1 for block in range(n_blocks))
