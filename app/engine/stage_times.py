"""What stages were seen to take for ubatches of some size over a context of some length. Pure.

A ubatch's time is taken to be something fixed, something for every row, and something for every cell that a row sees:
attention makes the same chunk several times as long at the end of a prompt as at its beginning. The three are fitted to
late measurements. Single ones say little: each is what the control plane saw, on a machine that did other things too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Until measurements tell, what is fixed is taken to cost as much as this many rows.
FIXED_ROWS = 8
#: And so many cells seen as much as a row.
GUESSED_ROW_CELLS = 4096
#: From so many rows on they are taken for a prompt's; fewer for decode, which reads weights and cache in another way.
PROMPT_ROWS = 32
#: The smallest prompt chunk.
MIN_CHUNK = 32
#: What old measurements still count after a new one.
_MEMORY = 0.98
#: How much the guess about what is fixed counts, and how much that cells cost nothing, beside one measurement. Chunks
#: of a prompt are much alike, so what is fixed of their times is noise for the most part; and chunks of other sizes
#: need programs of their own, which cost more than the best size gains.
_DECODE_GUESS, _PROMPT_GUESS, _NO_CELLS = 0.3, 4.0, 0.05
#: Sizes of decode steps measured so often have an own factor, since kernels take some sizes in steps.
TRUSTED_AFTER = 3
_NEW_FACTOR = 0.2

_Vector = tuple[float, float, float]


@dataclass(slots=True)
class _Fit:
    """Seconds = fixed + row * rows + cell * cells, by least squares of relative errors."""

    guess: float
    sums: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    right: list[float] = field(default_factory=lambda: [0.0] * 3)
    most_cells: float = 1.0
    parts: _Vector | None = None

    def note(self, n_rows: int, cells: float, seconds: float) -> None:
        # A time that is far too long says little, being divided by itself; one too short must not say more.
        scale_s = max(seconds, 0.0 if self.parts is None else self.seconds(n_rows, cells), 1e-9)
        row = (1 / scale_s, n_rows / scale_s, cells / scale_s)
        for i in range(3):
            for j in range(3):
                self.sums[i][j] = _MEMORY * self.sums[i][j] + row[i] * row[j]
            self.right[i] = _MEMORY * self.right[i] + row[i] * seconds / scale_s
        self.most_cells = max(_MEMORY * self.most_cells, cells)
        self.parts = self._solved(scale_s)

    def seconds(self, n_rows: int, cells: float) -> float:
        assert self.parts is not None
        fixed, row, cell = self.parts
        return fixed + row * n_rows + cell * cells

    def _solved(self, scale_s: float) -> _Vector:
        """With the guesses as measurements that always count a little."""
        guess, none = self.guess / scale_s, _NO_CELLS * self.most_cells / scale_s
        guesses = ((guess, -guess * FIXED_ROWS, 0.0), (0.0, 0.0, none))
        sums = [[self.sums[i][j] + sum(g[i] * g[j] for g in guesses) for j in range(3)] for i in range(3)]
        fixed, row, cell = _solve(sums, self.right)
        return max(0.0, fixed), max(0.0, row), max(0.0, cell)


def _solve(matrix: list[list[float]], right: list[float]) -> _Vector:
    """Gauss's elimination; the matrix is positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(3):
        for j in range(i + 1, 3):
            factor = rows[j][i] / rows[i][i] if rows[i][i] else 0.0
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * 3
    for i in (2, 1, 0):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, 3))
        found[i] = (rows[i][3] - rest) / rows[i][i] if rows[i][i] > 0 else 0.0
    return found[0], found[1], found[2]


@dataclass(slots=True)
class _Kind:
    """Prompt chunks or decode steps: behind another ubatch, and from an input to its output when the stage was idle."""

    behind: _Fit
    alone: _Fit
    factors: dict[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        return self.behind.parts is not None or self.alone.parts is not None

    def note(self, n_rows: int, cells: float, seconds: float, *, queued: bool) -> None:
        fit = self.behind if queued else self.alone
        fit.note(n_rows, cells, seconds)
        if not queued and self.behind.parts is not None and seconds < self.behind.seconds(n_rows, cells):
            self.behind.note(n_rows, cells, seconds)  # with others in front it takes no longer
        expected_s = fit.seconds(n_rows, cells)
        ratio = min(2.0, seconds / expected_s) if expected_s > 0 else 1.0
        factor, n_notes = self.factors.get(n_rows, (ratio, 0))
        self.factors[n_rows] = factor + _NEW_FACTOR * (ratio - factor), n_notes + 1

    def seconds(self, n_rows: int, cells: float, *, alone: bool) -> float:
        first, second = (self.alone, self.behind) if alone else (self.behind, self.alone)
        fit = second if first.parts is None else first
        factor, n_notes = self.factors.get(n_rows, (1.0, 0))
        is_step = n_rows < PROMPT_ROWS and n_notes >= TRUSTED_AFTER
        return fit.seconds(n_rows, cells) * (factor if is_step else 1.0)


def _kind(guess: float) -> _Kind:
    return _Kind(_Fit(guess), _Fit(guess))


@dataclass(slots=True)
class StageTimes:
    """One stage."""

    _decode: _Kind = field(default_factory=lambda: _kind(_DECODE_GUESS))
    _prompt: _Kind = field(default_factory=lambda: _kind(_PROMPT_GUESS))

    @property
    def is_measured(self) -> bool:
        return self._decode.is_measured or self._prompt.is_measured

    def note(self, n_rows: int, cells: float, seconds: float, *, queued: bool) -> None:
        """A ubatch of `n_rows` that saw `cells` in all, each row's counted."""
        self._kind(n_rows).note(n_rows, cells, seconds, queued=queued)

    def seconds(self, n_rows: int, cells: float = 0.0, *, alone: bool = False) -> float:
        """How long such a ubatch takes; before any measurement, in a unit of its own."""
        if not self.is_measured:
            return n_rows + FIXED_ROWS + cells / GUESSED_ROW_CELLS
        own, other = self._kind(n_rows), self._decode if n_rows >= PROMPT_ROWS else self._prompt
        return (own if own.is_measured else other).seconds(n_rows, cells, alone=alone)

    def _kind(self, n_rows: int) -> _Kind:
        return self._prompt if n_rows >= PROMPT_ROWS else self._decode
