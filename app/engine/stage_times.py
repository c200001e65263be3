"""What stages were seen to take for ubatches of some size over a context of some length. Pure.

A ubatch's time is taken to be that of its rows, whatever they see, and one part more for every cell that a row sees:
attention makes the same chunk several times as long at the end of a prompt as at its beginning.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

#: Until a size was measured, a ubatch is taken to cost as much as its rows and this many more.
FIXED_ROWS = 8
#: The smallest prompt chunk: below it, matrix products are hardly cheaper than with this many rows. Fewer rows are
#: taken for decode, which reads the cache in another way.
MIN_CHUNK = 32
#: What a new measurement counts beside the old ones when it is slower, and when it is faster. First runs are slow.
_SLOWER, _FASTER = 0.2, 0.5
#: Sizes measured less often say nothing where others say something: their first runs may have prepared things.
TRUSTED_AFTER = 3
#: What old measurements still count in the time of a cell after a new one.
_MEMORY = 0.95
#: A measurement that is further from what was expected says no more about the time of a cell than one that is not.
_BELIEVED = 0.5
#: Of a ubatch's time at least so much does not depend on what it sees.
_LEAST_BASE = 0.05


@dataclass(slots=True)
class _Slope:
    """Seconds per cell, from how measurements of one size differ as they see more or less. Least squares."""

    both: float = 0.0
    cells: float = 0.0

    def note(self, cells: float, seconds: float) -> None:
        """Both as differences to what ubatches of this size had before."""
        self.both = _MEMORY * self.both + cells * seconds
        self.cells = _MEMORY * self.cells + cells * cells

    @property
    def value(self) -> float:
        return max(0.0, self.both / self.cells) if self.cells else 0.0


@dataclass(slots=True)
class _Mean:
    """Seconds and cells of late measurements."""

    seconds: float
    cells: float

    def note(self, cells: float, seconds: float, slope: _Slope) -> None:
        expected_s = max(_LEAST_BASE * self.seconds, self.seconds + slope.value * (cells - self.cells))
        believed_s = min(max(seconds, (1 - _BELIEVED) * expected_s), (1 + _BELIEVED) * expected_s)
        slope.note(cells - self.cells, believed_s - self.seconds)
        weight = _FASTER if seconds < expected_s else _SLOWER
        self.seconds += weight * (seconds - self.seconds)
        self.cells += weight * (cells - self.cells)

    def base_s(self, slope: _Slope) -> float:
        """Without what was seen."""
        return max(_LEAST_BASE * self.seconds, self.seconds - slope.value * self.cells)


@dataclass(slots=True)
class _Measured:
    """One size: behind another ubatch, and from an input to its output when the stage was idle."""

    behind: _Mean | None = None
    alone: _Mean | None = None
    n_notes: int = 0

    def note(self, cells: float, seconds: float, slope: _Slope, *, queued: bool) -> None:
        self.n_notes += 1
        mean = self.behind if queued else self.alone
        if mean is not None:
            mean.note(cells, seconds, slope)
        elif queued:
            self.behind = _Mean(seconds, cells)
        else:
            self.alone = _Mean(seconds, cells)

    def base_s(self, slope: _Slope, *, alone: bool) -> float:
        first, second = (self.alone, self.behind) if alone else (self.behind, self.alone)
        mean = second if first is None else first
        assert mean is not None
        return mean.base_s(slope)


@dataclass(slots=True)
class StageTimes:
    """One stage; sizes between those measured are interpolated."""

    _by_rows: dict[int, _Measured] = field(default_factory=dict)
    _trusted: list[int] = field(default_factory=list)
    _slopes: tuple[_Slope, _Slope] = field(default_factory=lambda: (_Slope(), _Slope()))

    @property
    def is_measured(self) -> bool:
        return bool(self._by_rows)

    def note(self, n_rows: int, cells: float, seconds: float, *, queued: bool) -> None:
        """A ubatch of `n_rows` that saw `cells` in all, each row's counted."""
        measured = self._by_rows.setdefault(n_rows, _Measured())
        measured.note(cells, seconds, self._slope(n_rows), queued=queued)
        if measured.n_notes == TRUSTED_AFTER:
            insort(self._trusted, n_rows)

    def seconds(self, n_rows: int, cells: float = 0.0, *, alone: bool = False) -> float:
        """How long such a ubatch takes; before any measurement, in a unit of its own."""
        if not self._by_rows:
            return float(n_rows + FIXED_ROWS)
        return self._rows_s(n_rows, alone) + self._slope(n_rows).value * cells

    def _slope(self, n_rows: int) -> _Slope:
        return self._slopes[n_rows >= MIN_CHUNK]

    def _rows_s(self, n_rows: int, alone: bool) -> float:
        rows = self._trusted or sorted(self._by_rows)
        at = bisect_left(rows, n_rows)
        above = rows[min(at, len(rows) - 1)]
        high_s = self._by_rows[above].base_s(self._slope(above), alone=alone)
        if above == n_rows:
            return high_s
        if above < n_rows or at == 0:  # outside of what was measured
            return high_s * (n_rows + FIXED_ROWS) / (above + FIXED_ROWS)
        below = rows[at - 1]
        low_s = self._by_rows[below].base_s(self._slope(below), alone=alone)
        return low_s + (high_s - low_s) * (n_rows - below) / (above - below)
