"""How large prompt chunks are and how many decode groups take turns, from measured stage times. Pure.

Stages are a flow shop: each takes its ubatches in order and passes them on. The longest ubatch fills and drains the
pipeline, so chunks shall take the same time, not the same rows; small ones do that fast, large ones pay the fixed costs
of a ubatch less often. Which wins is worked out by running the shop on paper with the times that stages were seen to
take.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from app.engine.stage_times import MIN_CHUNK, PROMPT_ROWS, StageTimes

#: Groups must promise this much of the time of one group, or less: taking turns has costs nobody measured.
WORTH_IT = 0.95
#: A prompt's chunk beside decode may make the step take this much as long as decode alone would.
BESIDE_DECODE = 2.0
#: But so many rows it may have in any case, and as many as fill the size up: fewer cost far more each.
LEAST_BESIDE = 32
#: What a ubatch costs the control plane, which may share cores with a stage.
CONTROL_S = 2e-3
#: Of chunks that finish within this much of the first the largest is taken: what small ones cost is seen late.
AS_GOOD = 1.02
#: And the one that prompts began with before is, if it is within this much.
STAYS = 1.01
#: A chunk may take so much longer than the first one of its prompt: sizes come in steps.
_AS_LONG = 1.05
#: Chunks that are worked out one by one; those beyond are as long as the last of them.
_EXACT_CHUNKS = 40
#: With no more left than so many chunks, what is left is worked out anew each time.
_LAST_CHUNKS = 4

#: A prompt as far as chunks are concerned: tokens to compute, and tokens before them.
Prompt = tuple[int, int]
#: A ubatch: its rows, and the cells they see, each its own.
InFlight = tuple[int, float]


def least_in_flight(n_stages: int) -> int:
    """Ubatches for stages without links: one each and some to spare, so that a late one leaves no stage idle."""
    return n_stages + max(2, n_stages // 2)


class _Rows:
    """The rows of some prompts one after the other, and how many cells they see."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._ends = list(accumulate(n_tokens for n_tokens, _ in prompts))
        self._cells = list(accumulate((n * (past + n / 2) for n, past in prompts), initial=0.0))

    def cells(self, first: int, last: int) -> float:
        """What rows [first, last) see, each its own."""
        return self._before(last) - self._before(first)

    def _before(self, row: int) -> float:
        at = bisect_right(self._ends, row)
        if at == len(self._ends):
            return self._cells[-1]
        n_rows = row - (self._ends[at - 1] if at else 0)
        return self._cells[at] + n_rows * (self._prompts[at][1] + n_rows / 2)


class Pacing:
    """Decides for one set of stages. With a single one there is nothing to overlap, only decode not to be held up."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: the padded numbers of rows that ubatches have, ascending; the last one is the largest allowed."""
        self._sizes = tuple(sizes)
        self._chunk_sizes = [size for size in self._sizes if size >= MIN_CHUNK] or [self._sizes[-1]]
        self._stages: list[StageTimes] = []
        self._row_cells = 0.0
        self._model: InFlight | None = None  # chunks of the prompts in work shall take as long as this one would now
        self._n_left = 0
        self._first: int | None = None  # what the last prompt without a past began with

    def padded(self, n_rows: int) -> int:
        """The size that a ubatch of this many rows has."""
        return self._sizes[min(bisect_left(self._sizes, n_rows), len(self._sizes) - 1)]

    def note(self, stage: int, n_rows: int, cells: float, seconds: float, *, queued: bool) -> None:
        """A stage took so long for a ubatch whose rows saw `cells` in all.

        `queued`: it was waiting when the stage became free.
        """
        while len(self._stages) <= stage:
            self._stages.append(StageTimes())
            self._model = None  # it was worked out with guesses
        self._stages[stage].note(self.padded(n_rows), cells, seconds, queued=queued)
        if n_rows < PROMPT_ROWS:
            self._row_cells += 0.2 * (cells / n_rows - self._row_cells)

    def prompt_chunk(self, n_stages: int, prompts: Sequence[Prompt], in_flight: Sequence[InFlight] = ()) -> int:
        """Rows of the next prompt chunk for these prompts, behind ubatches `in_flight`, oldest first.

        How long chunks shall take is worked out when there is more to do than before, and for the last of them.
        """
        n_left = sum(n_tokens for n_tokens, _ in prompts)
        if n_stages < 2 or n_left <= 0:
            return self._sizes[-1]
        stages, rows = self._known(n_stages), _Rows(prompts)
        has_more, self._n_left = n_left > self._n_left, n_left
        longest = self._sizes[-1]
        if self._model is not None and not has_more:
            longest = min(self._model[0], self._as_long(stages, rows, 0, _slowest_s(stages, *self._model)))
            if n_left > _LAST_CHUNKS * longest:
                return longest
        is_fresh = has_more and prompts[0][1] == 0
        chunk = min(longest, self._first_chunk(stages, rows, n_left, in_flight, self._first if is_fresh else None))
        self._first = chunk if is_fresh else self._first
        self._model = chunk, rows.cells(0, chunk)
        return self._opening(chunk) if is_fresh and n_left > _LAST_CHUNKS * chunk else chunk

    def _opening(self, chunk: int) -> int:
        """Half of what the others have, which sets the next stage to work sooner; and sizes that differ tell what of a
        stage's time is fixed."""
        return next(size for size in self._sizes if size >= chunk / 2)

    def chunk_beside(
        self, n_stages: int, prompts: Sequence[Prompt], ready: InFlight, now: InFlight, most: int | None = None
    ) -> int:
        """Rows of the next prompt chunk in a step with the decode rows that are `ready`, so that streams hardly notice.

        `now`: the decode rows that steps have, by which it is known how long a step takes without a prompt. `most`: the
        size that the step shall not exceed, but for the least that goes beside decode.
        """
        stages, rows = self._known(n_stages), _Rows(prompts)
        limits_s = [BESIDE_DECODE * stage.seconds(self.padded(now[0]), now[1]) for stage in stages]
        least = self.padded(ready[0] + LEAST_BESIDE)
        largest = self._sizes[-1] if most is None else most
        chosen = least
        for size in self._sizes:
            cells = ready[1] + rows.cells(0, max(0, size - ready[0]))
            is_long = any(stage.seconds(size, cells) > limit_s for stage, limit_s in zip(stages, limits_s, strict=True))
            if size > largest or is_long:
                break
            chosen = max(chosen, size)
        return max(1, chosen - ready[0])

    def n_groups(self, n_stages: int, n_decoding: int) -> int:
        """Into how many groups sequences that decode shall be divided: up to one per stage where that pays."""
        stages = self._known(n_stages)
        if n_stages < 2 or n_decoding < 2 or not all(s.is_measured for s in stages):
            return 1
        rounds_s = [self._round_s(stages, n_decoding, n) for n in range(1, min(n_stages, n_decoding) + 1)]
        best_s = min(rounds_s)
        return 1 + rounds_s.index(best_s) if best_s <= WORTH_IT * rounds_s[0] else 1

    def n_in_flight(self, n_stages: int, n_rows: int, cells: float = 0.0) -> int:
        """Ubatches of this size that keep every stage and every link busy, with some to spare."""
        stages, least = self._known(n_stages), least_in_flight(n_stages)
        if n_stages < 2 or not all(stage.is_measured for stage in stages):
            return least
        n_rows = self.padded(n_rows)
        turns_s = [stage.seconds(n_rows, cells) for stage in stages]
        alone_s = [stage.seconds(n_rows, cells, alone=True) for stage in stages]
        way_s, slowest_s = sum(map(max, alone_s, turns_s)), max(turns_s)
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
        cells = n_rows * self._row_cells
        way_s = sum(stage.seconds(n_rows, cells, alone=True) for stage in stages)
        return max(way_s, n_groups * _slowest_s(stages, n_rows, cells))

    def _first_chunk(
        self,
        stages: Sequence[StageTimes],
        rows: _Rows,
        n_left: int,
        ahead: Sequence[InFlight],
        usual: int | None,
    ) -> int:
        """The first chunk of those that finish first, all taking as long as it does; the usual one if it is as good,
        since other sizes need programs of their own."""
        enough = max(self._chunk_sizes[0], self.padded(n_left))
        sizes = [size for size in self._chunk_sizes if size <= enough]
        finish_s = {size: self._finish_s(stages, rows, n_left, size, ahead) for size in sizes}
        best_s = min(finish_s.values())
        if usual is not None and finish_s.get(usual, float("inf")) <= STAYS * best_s:
            return usual
        return [size for size in sizes if finish_s[size] <= AS_GOOD * best_s][-1]

    def _finish_s(
        self, stages: Sequence[StageTimes], rows: _Rows, n_left: int, first: int, ahead: Sequence[InFlight]
    ) -> float:
        """When the last stage has finished the prompts if chunks take as long as the first one, of `first` rows."""
        finish_s = [0.0] * len(stages)
        for n_rows, cells in ahead:
            _run(stages, finish_s, self.padded(n_rows), cells)
        control_s = CONTROL_S if all(stage.is_measured for stage in stages) else 0.0
        begin = end = 0
        for begin, end in self._walk(stages, rows, n_left, first):
            _run(stages, finish_s, self.padded(end - begin), rows.cells(begin, end), control_s)
        if end < n_left:
            size = self.padded(end - begin)
            n_more = (n_left - end) / (end - begin)
            return finish_s[-1] + n_more * (control_s + _slowest_s(stages, size, rows.cells(end, n_left) / n_more))
        return finish_s[-1]

    def _walk(self, stages: Sequence[StageTimes], rows: _Rows, n_left: int, first: int) -> Iterator[tuple[int, int]]:
        """First and last row of every chunk."""
        chunk_s = _slowest_s(stages, first, rows.cells(0, first))
        at = 0
        for _ in range(_EXACT_CHUNKS):
            end = min(n_left, at + self._as_long(stages, rows, at, chunk_s))
            yield at, end
            if end == n_left:
                return
            at = end

    def _as_long(self, stages: Sequence[StageTimes], rows: _Rows, at: int, chunk_s: float) -> int:
        """The largest chunk from row `at` on that the slowest stage does in this time."""
        low, high = 0, len(self._chunk_sizes)
        while high - low > 1:
            middle = (low + high) // 2
            size = self._chunk_sizes[middle]
            if _slowest_s(stages, size, rows.cells(at, at + size)) <= _AS_LONG * chunk_s:
                low = middle
            else:
                high = middle
        return self._chunk_sizes[low]


def _run(
    stages: Sequence[StageTimes], finish_s: list[float], n_rows: int, cells: float, control_s: float = 0.0
) -> None:
    """One ubatch through the shop: `finish_s` is when each stage is free."""
    before_s = 0.0
    for number, stage in enumerate(stages):
        before_s = finish_s[number] = max(before_s, finish_s[number]) + stage.seconds(n_rows, cells) + control_s


def _slowest_s(stages: Sequence[StageTimes], n_rows: int, cells: float) -> float:
    return max(stage.seconds(n_rows, cells) for stage in stages)
