"""The sizes that shapes are rounded up to, so that one program serves many ubatches."""

from __future__ import annotations

from bisect import bisect_left

#: Programs see the cache in these steps up to eight of them, and from there on in steps of an eighth or less: one
#: program serves many decoded tokens, and long contexts need few.
KV_STEP_CELLS = 256
_BUCKETS = tuple(sorted({1, 3} | {base << shift for base in (2, 3) for shift in range(16)}))


def bucket(n: int, largest: int) -> int:
    """The smallest shape that holds `n` rows: 1, 2, 3, 4, 6, 8, 12, 16, ... but not above `largest`."""
    return max(n, min(_BUCKETS[bisect_left(_BUCKETS, n)], largest))


def buckets(largest: int) -> tuple[int, ...]:
    """All sizes that `bucket` gives."""
    return (*_BUCKETS[: bisect_left(_BUCKETS, largest)], largest)


def kv_bucket(n_cells: int) -> int:
    """The cells that a program looks at which has to see the first `n_cells`."""
    step = KV_STEP_CELLS << ((n_cells - 1) // (8 * KV_STEP_CELLS)).bit_length()
    return -(-n_cells // step) * step
