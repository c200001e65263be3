"""Amounts as people read them."""

from __future__ import annotations


def mib(n_bytes: int) -> str:
    """Bytes in MiB; so few that nothing would be left of them as they are."""
    if 0 < n_bytes < (1 << 20) / 20:
        return f"{n_bytes} byte{'s' if n_bytes > 1 else ''}"
    return f"{n_bytes / (1 << 20):,.1f} MiB"
