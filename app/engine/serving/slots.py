"""The places of running requests: each has one, the lowest free one first."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from app.errors import InternalError

T = TypeVar("T")


class SlotMap(Generic[T]):
    """Slots 0 .. n_slots-1 and who sits where."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free = list(range(n_slots))  # a heap
        self._owners: dict[int, T] = {}

    @property
    def n_free(self) -> int:
        return len(self._free)

    def acquire(self, owner: T) -> int:
        """The lowest free slot. The caller has seen that there is one."""
        if not self._free:
            raise InternalError(f"all {self.n_slots} slots are taken")
        slot = heappop(self._free)
        self._owners[slot] = owner
        return slot

    def release(self, slot: int) -> None:
        if self._owners.pop(slot, None) is None:
            raise InternalError(f"slot {slot} was released, but nobody had it")
        heappush(self._free, slot)

    def owner(self, slot: int) -> T | None:
        return self._owners.get(slot)

    def check_integrity(self) -> None:
        if sorted([*self._free, *self._owners]) != list(range(self.n_slots)):
            raise InternalError(f"slots are lost or doubled: free {sorted(self._free)}, taken {sorted(self._owners)}")
