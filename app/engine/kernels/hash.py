"""FNV-1a 64, the content hash of weights: native where the extension is built, numpy elsewhere.

Source: https://datatracker.ietf.org/doc/draft-eastlake-fnv/ (offset basis, prime, test vectors).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.device import Payload

try:
    from app.engine.kernels import _hash
except ImportError:  # a wheel of Python alone
    NATIVE = False
else:
    NATIVE = True

OFFSET_BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3

_MASK = (1 << 64) - 1
_BLOCK_BYTES = 1 << 16


def fnv1a64(data: Payload, previous: int = OFFSET_BASIS) -> int:
    """Hash of `data`, or of everything hashed so far followed by `data` when `previous` is that earlier hash.

    Takes any C-contiguous buffer; the GIL is free while the native form reads it.
    """
    return _hash.fnv1a64(data, previous) if NATIVE else fnv1a64_numpy(data, previous)


def fnv1a64_numpy(data: Payload, previous: int = OFFSET_BASIS) -> int:
    """The same by numpy, thirty times slower than native code and several times faster than a Python loop."""
    view = np.frombuffer(memoryview(data).cast("B"), dtype=np.uint8)
    for start in range(0, view.size, _BLOCK_BYTES):
        previous = _block(view[start : start + _BLOCK_BYTES], previous)
    return previous


def _block(data: NDArray[np.uint8], previous: int) -> int:
    """One block. A byte is xored into the low eight bits alone, so a step adds a small number and then multiplies:

    h' = (h + d) * P with d = (low ^ byte) - low. Given every d, the end is h * P^n + sum of d_i * P^(n - i).
    """
    low = _low_bytes(data, previous & 0xFF)
    added = (low ^ data).astype(np.int64) - low
    powers = _POWERS[data.size - 1 :: -1] if data.size else _POWERS[:0]
    total = int((added.astype(np.uint64) * powers).sum(dtype=np.uint64))
    return (previous * pow(PRIME, data.size, 1 << 64) + total) & _MASK


def _low_bytes(data: NDArray[np.uint8], first: int) -> NDArray[np.uint8]:
    """The low byte of the hash before each step.

    The prime is odd, so bit j of the next low byte is bit j of (low ^ byte), flipped by a carry that the bits below j
    alone decide. Bit by bit from the lowest, that recurrence is a running xor.
    """
    low = np.zeros(data.size, dtype=np.uint8)
    for bit in range(8):
        below = np.uint8((1 << bit) - 1)
        carry = ((low ^ data) & below) * np.uint8(PRIME & 0xFF)
        flips = ((carry ^ data) >> bit) & 1
        running = np.bitwise_xor.accumulate(flips) ^ np.uint8((first >> bit) & 1)
        low[0] |= first & (1 << bit)
        low[1:] |= running[:-1] << bit
    return low


#: PRIME^1 .. PRIME^_BLOCK_BYTES modulo 2^64.
_POWERS: NDArray[np.uint64] = np.cumprod(np.full(_BLOCK_BYTES, PRIME, dtype=np.uint64), dtype=np.uint64)
