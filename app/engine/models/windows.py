"""Which layers look through a sliding window."""

from __future__ import annotations

from app.engine.models.hparams import Keys

_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"


def read_window(keys: Keys, default: int | None = None) -> int:
    """The sliding window in tokens, the token itself included; 0 means none."""
    window = keys.integer(_WINDOW, default)
    if window < 0:
        raise keys.wrong(_WINDOW, window, "0 or more tokens")
    return window


def windowed_layers(keys: Keys, n_blocks: int, default_period: int) -> tuple[bool, ...]:
    """Per block. The file has a flag per block, or a period: all but the last layer of each period are windowed.

    A period of 0 means every layer, 1 none.
    """
    if isinstance(keys.gguf.metadata.get(f"{keys.architecture}.{_PATTERN}"), list):
        return tuple(bool(flag) for flag in keys.per_block(_PATTERN, n_blocks))
    period = keys.integer(_PATTERN, default_period)
    if period < 0:
        raise keys.wrong(_PATTERN, period, "a period of 0 or more blocks")
    return tuple(period == 0 or block % period < period - 1 for block in range(n_blocks))
