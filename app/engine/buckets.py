"""The sizes that shapes are rounded up to, so that one program serves many ubatches."""

from __future__ import annotations

from bisect import bisect_left

_BUCKETS = tuple(sorted({1, 3} | {base << shift for base in (2, 3) for shift in range(16)}))


def bucket(n: int, largest: int) -> int:
    """The smallest shape that holds `n` rows: 1, 2, 3, 4, 6, 8, 12, 16, ... but not above `largest`."""
    return max(n, min(_BUCKETS[bisect_left(_BUCKETS, n)], largest))


def buckets(largest: int) -> tuple[int, ...]:
    """All sizes that `bucket` gives."""
    return (*_BUCKETS[: bisect_left(_BUCKETS, largest)], largest)
