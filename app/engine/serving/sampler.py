"""How a request's next token is drawn from logits.

The order is llama.cpp's: bias, penalties, DRY, top-k, typical, top-p, min-p, XTC, temperature. Temperature zero (or
next to it) takes the best token after bias, penalties and mask, and neither filters nor seed matter. Mirostat 2
replaces the filters. Logprobs are those of the model: log-softmax of the raw logits at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.request import SamplingParams, TokenLogprob
from app.engine.rows import MAX_BEST, WHOLE, Row, RowWish
from app.engine.serving.filters import Race
from app.engine.serving.penalties import Breakers, Dry, History, RecentCounts
from app.engine.serving.randomness import uniform
from app.engine.serving.vocab_ops import Logits, best, draw, log_total, top
from app.errors import InvalidParameter, NoTokenLeft

#: At or below this temperature only the best token has any probability left.
GREEDY_TEMPERATURE = 1e-6

#: Independent random streams of one position.
_DRAW, _XTC = 0, 1


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, if asked for, its log-probability and the best alternatives (by logprob, then id)."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampler:
    """One request's way to draw, with its state: the tokens so far and mirostat's mu.

    What is drawn at a position depends on the logits, the tokens before it, and (seed, position): not on company,
    ubatch sizes or preemption. `seed` counts when `params.seed` is None. `breakers` are DRY's (see `find_breakers`).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        n_vocab: int,
        seed: int = 0,
        eog: Collection[int] = (),
        breakers: Breakers | None = None,
    ) -> None:
        if params.mirostat not in (0, 2):
            raise InvalidParameter(f"mirostat {params.mirostat} is not offered; use 0 or 2", param="mirostat")
        self.params = params
        self.seed = seed if params.seed is None else params.seed
        self.is_greedy = params.temperature <= GREEDY_TEMPERATURE
        self.mu = 2.0 * params.mirostat_tau
        self._race, self._xtc = _races(params)
        self._bias_ids, self._bias = _bias(params, n_vocab, eog)
        self._history = History(prompt)
        penalizes = params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._counts = RecentCounts(self._history, params.repeat_last_n) if penalizes and params.repeat_last_n else None
        repeats = params.dry_multiplier != 0.0 and params.dry_base >= 1.0 and params.dry_penalty_last_n != 0
        self._dry = Dry(params, breakers or {}, n_vocab) if repeats else None
        self._barred = self._only_barred()
        self._n_best = 0 if self._dry is not None or self._may_raise() else self._n_drawn_from()

    def _only_barred(self) -> frozenset[int] | None:
        """The tokens that are never drawn, if all there is to a draw is to take the best of the others."""
        if not self.is_greedy or self._counts is not None or self._dry is not None or (self._bias > -math.inf).any():
            return None
        return frozenset(self._bias_ids.tolist())

    def _may_raise(self) -> bool:
        """Whether a token may have a larger logit after bias and penalties than before."""
        params = self.params
        raises = params.repeat_penalty < 1.0 or params.presence_penalty < 0.0 or params.frequency_penalty < 0.0
        return bool((self._bias > 0).any()) or (self._counts is not None and raises)

    def _n_drawn_from(self) -> int:
        """How many best tokens a draw is between at most, and scores are told of; 0: unknown."""
        params = self.params
        n = 1 if self.is_greedy else 0 if params.mirostat else max(0, params.top_k)
        return max(n, params.n_logprobs or 0) if n else 0

    def wish(self, n_ahead: int = 0) -> RowWish:
        """How much of the next row `sample` needs, if there is no mask; or of the one after `n_ahead` more tokens.

        Bias and penalties that only lower logits cannot bring up more tokens than they push down.
        """
        n_lowered = len(self._bias_ids) + (0 if self._counts is None else len(self._counts) + n_ahead)
        if not self._n_best or self._n_best + n_lowered > MAX_BEST:
            return WHOLE
        return RowWish(self._n_best + n_lowered, self.params.n_logprobs is not None)

    def sample(self, row: Row, position: int, allowed: NDArray[Any] | None = None) -> SampledToken:
        """Draw the token for `position` from a row of logits (left as they are) and remember it.

        The row holds at least what was wished for; with `allowed` it must be a whole one.
        `allowed`: bool[n_vocab], or a bit mask of unsigned integers, lowest bit first; other tokens are out.
        Raises DeviceError when the logits hold NaN, NoTokenLeft when mask and bias leave nothing.
        """
        if self._barred is not None and allowed is None:
            place = row.best(self._barred)
        else:
            row.best()  # looks for what is broken
            adjusted = self._adjusted(row, allowed)
            place = best(adjusted)[0] if self.is_greedy else self._draw(adjusted, position)
        if place is None:
            raise _none_left()
        token = row.token(place)
        self._remember(token)
        if self.params.n_logprobs is None:
            return SampledToken(token)
        return score(row, place, self.params.n_logprobs)

    def _adjusted(self, row: Row, allowed: NDArray[Any] | None) -> Logits:
        """The logits with bias, penalties and mask; the row's own array when there is none of them."""
        if not len(self._bias_ids) and self._counts is None and self._dry is None and allowed is None:
            return row.values
        logits = row.values.copy()
        places, present = row.places(self._bias_ids)
        logits[places] += self._bias[present]
        if self._counts is not None:
            self._counts.penalize(logits, row.places, self.params)
        if self._dry is not None:
            self._dry.penalize(logits, self._history)
        if allowed is not None:
            logits[~_as_bools(allowed, len(logits))] = -np.inf
        if logits.max() == -np.inf:
            raise _none_left()
        return logits

    def _draw(self, logits: Logits, position: int) -> int:
        if self.params.mirostat:
            return self._mirostat(logits, position)
        with_xtc = self._xtc is not None and uniform(self.seed, position, _XTC) <= self.params.xtc_probability
        race = self._xtc if with_xtc and self._xtc is not None else self._race
        return draw(logits, race, uniform(self.seed, position, _DRAW))[0]

    def _mirostat(self, logits: Logits, position: int) -> int:
        """Mirostat 2: drop what surprises by more than mu bits, draw, and move mu so that surprise nears tau."""
        scale = 1.0 / self.params.temperature
        reach = self.mu * math.log(2.0) / scale - (log_total(logits, scale) / scale - float(logits[best(logits)[0]]))
        token, probability = draw(logits, Race(reach=reach, scale=scale), uniform(self.seed, position, _DRAW))
        self.mu += self.params.mirostat_eta * (math.log2(probability) + self.params.mirostat_tau)
        return token

    def _remember(self, token: int) -> None:
        self._history.push(token)
        if self._counts is not None:
            self._counts.push(self._history)


def score(row: Row, place: int, n_top: int) -> SampledToken:
    """The token there with its log-probability under the row's raw logits, and the `n_top` best alternatives."""
    total = row.log_total()
    alternatives = top(row.values, n_top) if n_top else ()
    return SampledToken(
        row.token(place),
        min(0.0, row.logit(place) - total),
        tuple(TokenLogprob(row.token(i), min(0.0, row.logit(i) - total)) for i in alternatives),
    )


def _none_left() -> NoTokenLeft:
    return NoTokenLeft("no token is left to draw: logit_bias and grammar together forbid them all")


def _races(params: SamplingParams) -> tuple[Race, Race | None]:
    """The filters of a draw without XTC, and of one with it if that ever happens."""
    race = Race(
        top_k=max(0, params.top_k),
        typical_p=params.typical_p,
        top_p=params.top_p,
        reach=-math.log(min(params.min_p, 1.0)) if params.min_p > 0.0 else math.inf,
        min_keep=max(1, params.min_keep),
        scale=1.0 / max(params.temperature, GREEDY_TEMPERATURE),
    )
    return race, replace(race, xtc_threshold=params.xtc_threshold) if params.xtc_probability > 0.0 else None


def _bias(params: SamplingParams, n_vocab: int, eog: Collection[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and what is added to their logits."""
    bias: Mapping[int, float] = params.logit_bias
    if params.ignore_eos:
        bias = {**bias, **dict.fromkeys(eog, -math.inf)}
    for token in bias:
        if not 0 <= token < n_vocab:
            raise InvalidParameter(f"token {token} does not exist; ids are 0 to {n_vocab - 1}", param="logit_bias")
    ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
    return ids, np.fromiter(bias.values(), dtype=np.float32, count=len(bias))


def _as_bools(allowed: NDArray[Any], n_vocab: int) -> NDArray[np.bool_]:
    if allowed.dtype == np.bool_:
        return allowed[:n_vocab]
    bits = np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), count=n_vocab, bitorder="little")
    return bits.view(np.bool_)
