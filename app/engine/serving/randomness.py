"""Random numbers that depend on a seed and a position alone, not on what was drawn before.

Counter-based: a finalizer with good avalanche (SplitMix64's) over seed, stream and position. So a request draws the
same tokens alone or in company, at once or after preemption.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: consecutive counters land far apart


def _mix(x: int) -> int:
    """SplitMix64's output function: a bijection on 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits. Seeds count modulo 2**64; streams of one position are independent."""
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key + (stream + 1) * _GOLDEN) & _MASK)
    return (_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53
