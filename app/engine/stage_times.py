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
#: The smallest prompt chunk, but for a rest: kernels take fewer rows a fifth dearer each.
MIN_CHUNK = 64
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
    """Seconds = fixed + row * rows + cell * cells, by least squares of relative errors.

    `sums` is the upper half of the normal equations' matrix, row by row, and `right` their right side.
    """

    guess: float
    sums: tuple[float, float, float, float, float, float] = (0.0,) * 6
    right: _Vector = (0.0,) * 3
    most_cells: float = 1.0
    parts: _Vector | None = None

    def note(self, n_rows: int, cells: float, seconds: float) -> None:
        # A time that is far too long says little, being divided by itself; one too short must not say more.
        scale_s = max(seconds, 0.0 if self.parts is None else self.seconds(n_rows, cells), 1e-9)
        a, b, c, d = 1 / scale_s, n_rows / scale_s, cells / scale_s, seconds / scale_s
        old, right = self.sums, self.right
        self.sums = (
            *(_MEMORY * old[0] + a * a, _MEMORY * old[1] + a * b, _MEMORY * old[2] + a * c),
            *(_MEMORY * old[3] + b * b, _MEMORY * old[4] + b * c, _MEMORY * old[5] + c * c),
        )
        self.right = _MEMORY * right[0] + a * d, _MEMORY * right[1] + b * d, _MEMORY * right[2] + c * d
        self.most_cells = max(_MEMORY * self.most_cells, cells)
        self.parts = self._solved(scale_s)

    def seconds(self, n_rows: int, cells: float, fixed_rows: int = 0) -> float:
        """With at least so many rows' time fixed."""
        assert self.parts is not None
        fixed, row, cell = self.parts
        return max(fixed, row * fixed_rows) + row * n_rows + cell * cells

    def _solved(self, scale_s: float) -> _Vector:
        """By Gauss's elimination, with the guesses as measurements that always count a little."""
        guess, none = self.guess / scale_s, _NO_CELLS * self.most_cells / scale_s
        rows = -guess * FIXED_ROWS
        m00, m01, m02, m11, m12, m22 = self.sums
        m00, m01, m11, m22 = m00 + guess * guess, m01 + guess * rows, m11 + rows * rows, m22 + none * none
        r0, r1, r2 = self.right
        factor, last = m01 / m00, m02 / m00
        m11, m12, m22 = m11 - factor * m01, m12 - factor * m02, m22 - last * m02
        r1, r2 = r1 - factor * r0, r2 - last * r0
        factor = m12 / m11 if m11 > 0 else 0.0
        m22, r2 = m22 - factor * m12, r2 - factor * r1
        cell = r2 / m22 if m22 > 0 else 0.0
        row = (r1 - m12 * cell) / m11 if m11 > 0 else 0.0
        fixed = (r0 - m01 * row - m02 * cell) / m00
        return max(0.0, fixed), max(0.0, row), max(0.0, cell)


@dataclass(slots=True)
class _Kind:
    """Prompt chunks or decode steps: behind another ubatch, and from an input to its output when the stage was idle."""

    behind: _Fit
    alone: _Fit
    factors: dict[int, tuple[float, int]] = field(default_factory=dict)
    is_measured: bool = False

    def note(self, n_rows: int, cells: float, seconds: float, *, queued: bool) -> None:
        self.is_measured = True
        fit = self.behind if queued else self.alone
        fit.note(n_rows, cells, seconds)
        if not queued and self.behind.parts is not None and seconds < self.behind.seconds(n_rows, cells):
            self.behind.note(n_rows, cells, seconds)  # with others in front it takes no longer
        expected_s = fit.seconds(n_rows, cells)
        ratio = min(2.0, seconds / expected_s) if expected_s > 0 else 1.0
        factor, n_notes = self.factors.get(n_rows, (ratio, 0))
        self.factors[n_rows] = factor + _NEW_FACTOR * (ratio - factor), n_notes + 1

    def seconds(self, n_rows: int, cells: float, *, alone: bool, fixed_rows: int = 0) -> float:
        first, second = (self.alone, self.behind) if alone else (self.behind, self.alone)
        seconds = (second if first.parts is None else first).seconds(n_rows, cells, fixed_rows)
        if n_rows >= PROMPT_ROWS:
            return seconds
        factor, n_notes = self.factors.get(n_rows, (1.0, 0))
        return seconds * factor if n_notes >= TRUSTED_AFTER else seconds


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
        own, other = (self._prompt, self._decode) if n_rows >= PROMPT_ROWS else (self._decode, self._prompt)
        if own.is_measured:
            return own.seconds(n_rows, cells, alone=alone)
        if not other.is_measured:
            return n_rows + FIXED_ROWS + cells / GUESSED_ROW_CELLS
        # A few rows of decode say nothing about what is fixed of a chunk.
        return other.seconds(n_rows, cells, alone=alone, fixed_rows=FIXED_ROWS if n_rows >= PROMPT_ROWS else 0)

    def _kind(self, n_rows: int) -> _Kind:
        return self._prompt if n_rows >= PROMPT_ROWS else self._decode
