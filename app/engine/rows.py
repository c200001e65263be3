"""Rows of logits on their way from a device to the sampler: whole, or of each row the best tokens alone.

A vocabulary is long and most draws look at a few tokens: what a sampler will need of a row is known before the row is
computed. So the device, where it can, sends records: the sum of all tokens' weights u64 (see `serving.weights`; 0 where
it was not asked for), then ids u32[n] in rising order, then their logits f32[n]. A row wanted whole is f32[n_columns].
What is drawn from a record is what would be drawn from the row, bit for bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import lt
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.serving.vocab_ops import Logits, best, best_numpy, log_total, top_numpy
from app.engine.serving.weights import ONE, weigh
from app.errors import DeviceError

try:
    from app.engine.kernels import _sampling
except ImportError:  # a wheel of Python alone
    NATIVE = False
else:
    NATIVE = True

#: The most tokens of a row that a record holds.
MAX_BEST = 1024

F32_BYTES = 4
_TOTAL = struct.Struct("<Q")
_ENTRY_BYTES = 8
#: Rows at least so many times longer than what is wanted of them are looked through on the device.
_WORTHWHILE = 4
_WISH = struct.Struct("<HH")
#: So many selections are remembered.
_MAX_SELECTIONS = 64


class RowWish(NamedTuple):
    """How much of a row is needed: its `n_best` tokens, 0 for all of them; and whether the weight of the row."""

    n_best: int
    weighs: bool


WHOLE = RowWish(0, False)


@dataclass(frozen=True)
class RowSelection:
    """What is wanted of each of some rows of float32 that lie one behind the other."""

    n_columns: int
    wishes: tuple[RowWish, ...]

    @property
    def source_bytes(self) -> int:
        """What the rows are on the device."""
        return len(self.wishes) * self.n_columns * F32_BYTES

    @property
    def are_whole(self) -> bool:
        """Whether nothing needs to be looked through."""
        return not any(wish.n_best for wish in self.wishes)

    @cached_property
    def n_bytes(self) -> int:
        """What is sent of them."""
        return sum(self._row_bytes(wish) for wish in self.wishes)

    def _row_bytes(self, wish: RowWish) -> int:
        return _TOTAL.size + wish.n_best * _ENTRY_BYTES if wish.n_best else self.n_columns * F32_BYTES

    def pieces(self, most_bytes: int) -> Iterator[RowSelection]:
        """The same in parts, of so many bytes of rows each; of one row at least, and at least one part."""
        n_rows = max(1, most_bytes // max(1, self.n_columns * F32_BYTES))
        if len(self.wishes) <= n_rows:
            yield self
            return
        for at in range(0, len(self.wishes), n_rows):
            yield RowSelection(self.n_columns, self.wishes[at : at + n_rows])

    def flaw(self) -> str | None:
        """Why nobody can want this, or None."""
        most = min(MAX_BEST, self.n_columns)
        worst = max((wish.n_best for wish in self.wishes), default=0)
        return f"the {worst} best of {self.n_columns} columns are more than {most}" if worst > most else None

    @cached_property
    def packed(self) -> bytes:
        """The wishes as they travel."""
        return b"".join(_WISH.pack(wish.n_best, wish.weighs) for wish in self.wishes)

    @staticmethod
    def unpack(n_columns: int, wishes: memoryview) -> RowSelection:
        """Raises ValueError when it was not packed."""
        if len(wishes) % _WISH.size:
            raise ValueError(f"{len(wishes)} bytes are not whole wishes of {_WISH.size}")
        return RowSelection(n_columns, tuple(RowWish(n, bool(weighs)) for n, weighs in _WISH.iter_unpack(wishes)))

    def select(self, rows: memoryview, into: memoryview | None = None) -> memoryview:
        """What is wanted of `source_bytes` bytes of rows; in memory of `n_bytes` bytes, if given."""
        selected = memoryview(bytearray(self.n_bytes)) if into is None else into
        if NATIVE:
            _sampling.select_rows(rows, self.n_columns, self.packed, selected)
        else:
            self.select_numpy(rows, selected)
        return selected

    def select_numpy(self, rows: memoryview, selected: memoryview) -> None:
        """As `select`, without native code: the reference."""
        table = np.frombuffer(rows, np.float32).reshape(len(self.wishes), self.n_columns)
        for row, wish, at in zip(table, self.wishes, self._places(), strict=True):
            if not wish.n_best:
                np.copyto(np.frombuffer(selected, np.float32, self.n_columns, at), row)
                continue
            ids, values = _entries(selected, at, wish.n_best)
            ids[:] = np.sort(top_numpy(row, wish.n_best))
            is_broken = best_numpy(row)[1]
            values[:] = np.nan if is_broken else row[ids]
            weighs = wish.weighs and not is_broken and row.max() > -np.inf
            _TOTAL.pack_into(selected, at, int(weigh(row.max() - row).sum()) if weighs else 0)

    def rows(self, selected: memoryview) -> list[Row]:
        """The rows of what was selected; they are views of it. Raises DeviceError for tokens that do not exist."""
        found: list[Row] = []
        at, data = 0, selected.cast("B")
        for wish in self.wishes:
            end = at + self._row_bytes(wish)
            if wish.n_best:
                found.append(self._record(data[at:end], wish.n_best))
            else:
                found.append(WholeRow(np.frombuffer(data[at:end], np.float32)))
            at = end
        return found

    def _record(self, data: memoryview, n: int) -> BestRow:
        logits_at = _TOTAL.size + n * F32_BYTES
        tokens = data[_TOTAL.size : logits_at].cast("I")
        ids = tokens.tolist()
        if ids[-1] >= self.n_columns or not all(map(lt, ids, ids[1:])):
            raise DeviceError(f"a device named tokens that are not {n} rising ones of {self.n_columns}")
        return BestRow(tokens, data[logits_at:].cast("f"), _TOTAL.unpack_from(data)[0])

    def _places(self) -> Iterator[int]:
        """Where each row's part begins in what is sent."""
        at = 0
        for wish in self.wishes:
            yield at
            at += self._row_bytes(wish)


def _entries(selected: memoryview, at: int, n: int) -> tuple[NDArray[np.uint32], Logits]:
    ids_at = at + _TOTAL.size
    ids = np.frombuffer(selected, np.uint32, n, ids_at)
    return ids, np.frombuffer(selected, np.float32, n, ids_at + n * F32_BYTES)


class Row(Protocol):
    """One row, as a sampler sees it."""

    @property
    def values(self) -> Logits:
        """Logits by place, in order of token id."""

    def token(self, place: int) -> int:
        """The token whose logit stands there."""

    def logit(self, place: int) -> float:
        """The logit that stands there."""

    def best(self, barred: Collection[int] = ()) -> int | None:
        """Where the largest logit stands, or the largest of a token that is not barred; None if all are.

        Raises DeviceError for logits that hold NaN or infinity.
        """

    def places(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], slice | NDArray[np.bool_]]:
        """Where the logits of tokens stand, for those of them that are here at all; and which those are."""

    def log_total(self) -> float:
        """log(sum(exp(logits))) of the whole row."""


_ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class WholeRow:
    """float32[n_vocab]: places are tokens."""

    values: Logits

    def token(self, place: int) -> int:
        return place

    def logit(self, place: int) -> float:
        return float(self.values[place])

    def best(self, barred: Collection[int] = ()) -> int | None:
        place, has_nan = best(self.values)
        if has_nan or not math.isfinite(self.values[place]):
            raise _broken()
        if place not in barred:
            return place
        left = self.values.copy()
        left[list(barred)] = -np.inf
        place, _ = best(left)
        return place if left[place] > -np.inf else None

    def places(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], slice | NDArray[np.bool_]]:
        return tokens, _ALL

    def log_total(self) -> float:
        return log_total(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class BestRow:
    """The best tokens of a row in rising order, their logits, and the weight of all tokens if it was asked for."""

    tokens: memoryview
    logits: memoryview[float]
    total: int

    @property
    def values(self) -> Logits:
        return np.asarray(self.logits, np.float32)

    def token(self, place: int) -> int:
        return int(self.tokens[place])

    def logit(self, place: int) -> float:
        return float(self.logits[place])

    def best(self, barred: Collection[int] = ()) -> int | None:
        logits: Sequence[float] = self.logits.tolist()
        peak = max(logits)
        if not math.isfinite(peak) or math.isnan(sum(logits)):
            raise _broken()
        if barred:
            logits = [-math.inf if self.tokens[i] in barred else logit for i, logit in enumerate(logits)]
            peak = max(logits)
        return logits.index(peak) if peak > -math.inf else None

    def places(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], slice | NDArray[np.bool_]]:
        ids = np.frombuffer(self.tokens, np.uint32)
        at = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
        present = ids[at] == tokens
        return at[present], present

    def log_total(self) -> float:
        if self.total < ONE:  # what the best token weighs alone
            raise DeviceError(f"a device gave a row of logits a weight of {self.total}, which no row has")
        return max(self.logits.tolist()) + math.log(float(self.total) / ONE)


def _broken() -> DeviceError:
    return DeviceError("the model's logits hold NaN or infinity; a weight or a kernel is broken")


def whole_rows(data: memoryview, n_columns: int) -> list[Row]:
    """The rows of float32[n, n_columns]."""
    return [WholeRow(row) for row in np.frombuffer(data, np.float32).reshape(-1, n_columns)]


def selection_of(wishes: Sequence[RowWish], n_columns: int) -> RowSelection | None:
    """What to select for such wishes: a whole row where a record would be hardly shorter; None if all are whole."""
    return _selection(tuple(wishes), n_columns)


@lru_cache(_MAX_SELECTIONS)
def _selection(wishes: tuple[RowWish, ...], n_columns: int) -> RowSelection | None:
    """Made once for as long as the same requests are served: it is immutable, and knows its sizes."""
    sensible = tuple(wish if _WORTHWHILE * wish.n_best < n_columns else WHOLE for wish in wishes)
    return RowSelection(n_columns, sensible) if any(wish.n_best for wish in sensible) else None
