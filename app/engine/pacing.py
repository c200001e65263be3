"""How large prompt chunks are and how many decode groups take turns, from measured stage times. Pure.

Stages are a flow shop: each takes its ubatches in order and passes them on. Small chunks fill and drain the pipeline
fast, large ones pay the fixed costs of a ubatch less often; which wins is worked out by running the shop on paper with
the times that stages were seen to take.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Until a size was measured, a ubatch is taken to cost as much as its rows and this many more.
FIXED_ROWS = 32
#: The smallest prompt chunk: below it, matrix products are hardly cheaper than with this many rows.
MIN_CHUNK = 32
#: Groups must promise this much of the time of one group, or less: taking turns has costs nobody measured.
WORTH_IT = 0.95
#: Of chunks that finish within this much of the first the largest is taken: each costs the control plane something too.
AS_GOOD = 1.03
#: What a new measurement counts beside the old ones when it is slower, and when it is faster. First runs are slow.
_SLOWER, _FASTER = 0.2, 0.5
#: Sizes measured less often say nothing where others say something: their first runs may have prepared things.
_TRUSTED_AFTER = 3
#: Chunks that are worked out one by one; those beyond go at the pace of the slowest stage.
_EXACT_CHUNKS = 12


def least_in_flight(n_stages: int) -> int:
    """Ubatches for stages without links: one each and some to spare, so that a late one leaves no stage idle."""
    return n_stages + max(1, n_stages // 2)


@dataclass(slots=True)
class Measured:
    """Seconds a stage takes for a number of rows: behind another ubatch, and from an input to its output when idle."""

    behind_s: float | None = None
    alone_s: float | None = None
    n_notes: int = 0

    def note(self, seconds: float, *, queued: bool) -> None:
        self.n_notes += 1
        if queued:
            self.behind_s = _blend(self.behind_s, seconds)
        else:
            self.alone_s = _blend(self.alone_s, seconds)

    def seconds(self, *, alone: bool) -> float:
        first, second = (self.alone_s, self.behind_s) if alone else (self.behind_s, self.alone_s)
        value = second if first is None else first
        assert value is not None
        return value


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + (_FASTER if new < old else _SLOWER) * (new - old)


class StageTimes:
    """What one stage was seen to take, by rows; what lies between is interpolated."""

    def __init__(self) -> None:
        self._by_rows: dict[int, Measured] = {}
        self._trusted: list[int] = []

    @property
    def is_measured(self) -> bool:
        return bool(self._by_rows)

    def note(self, n_rows: int, seconds: float, *, queued: bool) -> None:
        measured = self._by_rows.setdefault(n_rows, Measured())
        measured.note(seconds, queued=queued)
        if measured.n_notes == _TRUSTED_AFTER:
            insort(self._trusted, n_rows)

    def seconds(self, n_rows: int, *, alone: bool = False) -> float:
        """How long this many rows take; before any measurement, in a unit of its own."""
        if not self._by_rows:
            return float(n_rows + FIXED_ROWS)
        rows = self._trusted or sorted(self._by_rows)
        at = bisect_left(rows, n_rows)
        above = rows[min(at, len(rows) - 1)]
        high_s = self._by_rows[above].seconds(alone=alone)
        if above == n_rows:
            return high_s
        if above < n_rows or at == 0:  # outside of what was measured
            return high_s * (n_rows + FIXED_ROWS) / (above + FIXED_ROWS)
        below = rows[at - 1]
        low_s = self._by_rows[below].seconds(alone=alone)
        return low_s + (high_s - low_s) * (n_rows - below) / (above - below)


class Pacing:
    """Decides for one set of stages. With a single stage there is nothing to overlap and nothing to decide."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: the padded numbers of rows that ubatches have, ascending; the last one is the largest allowed."""
        self._sizes = tuple(sizes)
        self._stages: list[StageTimes] = []

    def padded(self, n_rows: int) -> int:
        """The size that a ubatch of this many rows has."""
        return self._sizes[min(bisect_left(self._sizes, n_rows), len(self._sizes) - 1)]

    def note(self, stage: int, n_rows: int, seconds: float, *, queued: bool) -> None:
        """A stage took so long for a ubatch; `queued`: it was waiting when the stage became free."""
        while len(self._stages) <= stage:
            self._stages.append(StageTimes())
        self._stages[stage].note(self.padded(n_rows), seconds, queued=queued)

    def prompt_chunk(self, n_stages: int, n_tokens: int, in_flight: Sequence[int]) -> int:
        """Rows of the next prompt chunk when `n_tokens` are left, behind ubatches of `in_flight` rows, oldest first."""
        largest = self._sizes[-1]
        if n_stages < 2 or n_tokens <= 0:
            return largest
        stages = self._known(n_stages)
        rows_ahead = [self.padded(n_rows) for n_rows in in_flight]
        candidates = [size for size in self._sizes if size >= MIN_CHUNK] or [largest]
        finish_s = {size: self._finish_s(stages, rows_ahead, n_tokens, size) for size in candidates}
        limit_s = AS_GOOD * min(finish_s.values())
        return max(size for size in candidates if finish_s[size] <= limit_s)

    def n_groups(self, n_stages: int, n_decoding: int) -> int:
        """Into how many groups sequences that decode shall be divided: up to one per stage where that pays."""
        if n_stages < 2 or n_decoding < 2 or not all(s.is_measured for s in self._known(n_stages)):
            return 1
        stages = self._known(n_stages)
        one_s = self._round_s(stages, n_decoding, 1)
        best = min(range(1, min(n_stages, n_decoding) + 1), key=lambda n: self._round_s(stages, n_decoding, n))
        return best if self._round_s(stages, n_decoding, best) <= WORTH_IT * one_s else 1

    def n_in_flight(self, n_stages: int, n_rows: int) -> int:
        """Ubatches of this size that keep every stage and every link busy, with some to spare."""
        stages, least = self._known(n_stages), least_in_flight(n_stages)
        if n_stages < 2 or not all(stage.is_measured for stage in stages):
            return least
        n_rows = self.padded(n_rows)
        way_s = sum(max(s.seconds(n_rows, alone=True), s.seconds(n_rows)) for s in stages)
        slowest_s = max(stage.seconds(n_rows) for stage in stages)
        return min(4 * n_stages, max(least, 1 + -int(-way_s // slowest_s))) if slowest_s > 0 else least

    def _known(self, n_stages: int) -> list[StageTimes]:
        """The stages' times; if any was never measured all are guessed, since a guess has no unit."""
        known = self._stages[:n_stages]
        if len(known) == n_stages and all(stage.is_measured for stage in known):
            return known
        return [StageTimes() for _ in range(n_stages)]

    def _round_s(self, stages: Sequence[StageTimes], n_decoding: int, n_groups: int) -> float:
        """One step of every sequence: a group's way over all stages, or as long as its turn takes to come again."""
        n_rows = self.padded(-(-n_decoding // n_groups))
        way_s = sum(stage.seconds(n_rows, alone=True) for stage in stages)
        return max(way_s, n_groups * max(stage.seconds(n_rows) for stage in stages))

    def _finish_s(self, stages: Sequence[StageTimes], ahead: Sequence[int], n_tokens: int, size: int) -> float:
        """When the last stage has finished the prompt if it goes in chunks of `size`."""
        finish_s = [0.0] * len(stages)
        n_chunks = -(-n_tokens // size)
        for n_rows in (*ahead, *self._exact(n_chunks, n_tokens, size)):
            before_s = 0.0
            for number, stage in enumerate(stages):
                before_s = finish_s[number] = max(before_s, finish_s[number]) + stage.seconds(n_rows)
        slowest_s = max(stage.seconds(size) for stage in stages)
        return finish_s[-1] + max(0, n_chunks - _EXACT_CHUNKS) * slowest_s

    def _exact(self, n_chunks: int, n_tokens: int, size: int) -> Iterator[int]:
        for number in range(max(0, n_chunks - _EXACT_CHUNKS), n_chunks):
            yield self.padded(min(size, n_tokens - number * size))
