"""Who waits and who runs: admission, preemption and leaving, with everything a sequence holds."""

from __future__ import annotations

from bisect import insort

from app.engine.serving.cache import KvCache
from app.engine.serving.sequence import Phase, Sequence
from app.engine.serving.slots import SlotMap
from app.engine.serving.types import SchedulerConfig
from app.errors import InternalError


class Roster:
    """Every live sequence is in exactly one of two lists, both in order of arrival. Only running ones hold memory."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = KvCache(config)
        self.slots: SlotMap[Sequence] = SlotMap(config.n_slots)
        self.live: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.n_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """The newest arrival waits at the end."""
        self.live[sequence.id] = sequence
        self.waiting.append(sequence)

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and what the cache has of it, if there is room for all its tokens."""
        if self.slots.n_free == 0:
            return False
        match = self.cache.match(sequence)
        if self.running and self.cache.n_blocks_needed(sequence, match) > self._n_blocks_to_spare():
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=arrival)
        sequence.slot = self.slots.acquire(sequence)
        sequence.phase = Phase.RUNNING
        self.cache.join(sequence, match)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue. A token of it in flight is still good: everything it needs comes earlier in the lanes."""
        self._stop(sequence)
        sequence.requeue()
        sequence.n_preemptions += 1
        self.n_preemptions += 1
        insort(self.waiting, sequence, key=arrival)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is over; nothing of it is held any more."""
        if sequence.phase is Phase.RUNNING:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.phase = Phase.ENDED
        del self.live[sequence.id]

    def lose_memory(self) -> None:
        """The devices lost everything: all wait, with their tokens alone."""
        self.cache = KvCache(self.config)
        self.slots = SlotMap(self.config.n_slots)
        for sequence in self.live.values():
            sequence.forget_memory()
            sequence.requeue()
        self.running = []
        self.waiting = sorted(self.live.values(), key=arrival)

    def check_integrity(self) -> None:
        self.slots.check_integrity()
        self.cache.check_integrity(self.running)
        if sorted(self.live.values(), key=arrival) != sorted([*self.waiting, *self.running], key=arrival):
            raise InternalError("the live requests are not those that wait or run")
        for queue, phase in ((self.waiting, Phase.WAITING), (self.running, Phase.RUNNING)):
            if queue != sorted(queue, key=arrival) or any(s.phase is not phase for s in queue):
                raise InternalError(f"the list of {phase.name.lower()} requests is out of order")
        for sequence in self.running:
            if self.slots.owner(sequence.slot) is not sequence:
                raise InternalError(f"request {sequence.id} does not own slot {sequence.slot}")
        if any(s.blocks or s.tail is not None or s.slot >= 0 for s in self.waiting):
            raise InternalError("a waiting request holds blocks or a slot")

    def _stop(self, sequence: Sequence) -> None:
        self.cache.leave(sequence)
        self.running.remove(sequence)
        self.slots.release(sequence.slot)
        sequence.slot = -1

    def _n_blocks_to_spare(self) -> int:
        """Blocks that are free or can be evicted, less what running sequences will soon take."""
        pool = self.cache.pool
        promised = sum(1 + s.n_blocks_missing for s in self.running)
        return pool.n_free + pool.n_evictable - promised


def arrival(sequence: Sequence) -> int:
    return sequence.arrival
