"""How a request's next token is drawn from logits.

The order is llama.cpp's: bias, penalties, DRY, top-k, typical, top-p, min-p, XTC, temperature. Temperature zero (or
next to it) takes the best token after bias, penalties and mask, and neither filters nor seed matter. Mirostat 2
replaces the filters. Logprobs are those of the model: log-softmax of the raw logits at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.request import SamplingParams, TokenLogprob
from app.engine.serving import filters
from app.engine.serving.penalties import Breakers, Dry, History, RecentCounts
from app.engine.serving.randomness import uniform
from app.engine.serving.vocab_ops import Candidates, Logits, at_least, draw_from_all, log_total, ranked, top
from app.errors import DeviceError, InvalidParameter, NoTokenLeft

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
        self._bias_ids, self._bias = _bias(params, n_vocab, eog)
        self._history = History(prompt)
        penalizes = params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._counts = RecentCounts(self._history, params.repeat_last_n) if penalizes and params.repeat_last_n else None
        repeats = params.dry_multiplier != 0.0 and params.dry_base >= 1.0 and params.dry_penalty_last_n != 0
        self._dry = Dry(params, breakers or {}, n_vocab) if repeats else None

    def sample(self, logits: Logits, position: int, allowed: NDArray[Any] | None = None) -> SampledToken:
        """Draw the token for `position` from float32[n_vocab] (left as they are) and remember it.

        `allowed`: bool[n_vocab], or a bit mask of unsigned integers, lowest bit first; other tokens are out.
        Raises DeviceError when the logits hold NaN, NoTokenLeft when mask and bias leave nothing.
        """
        if math.isnan(logits.max()):
            raise DeviceError("the model's logits hold NaN; a weight or a kernel is broken")
        token = self._choose(self._adjusted(logits, allowed), position)
        self._remember(token)
        if self.params.n_logprobs is None:
            return SampledToken(token)
        return score(logits, token, self.params.n_logprobs)

    def _adjusted(self, logits: Logits, allowed: NDArray[Any] | None) -> Logits:
        """The logits with bias, penalties and mask; the given array itself when there is none of them."""
        if not len(self._bias_ids) and self._counts is None and self._dry is None and allowed is None:
            return logits
        logits = logits.copy()
        logits[self._bias_ids] += self._bias
        if self._counts is not None:
            self._counts.penalize(logits, self.params)
        if self._dry is not None:
            self._dry.penalize(logits, self._history)
        if allowed is not None:
            logits[~_as_bools(allowed, len(logits))] = -np.inf
        if logits.max() == -np.inf:
            raise NoTokenLeft("no token is left to draw: logit_bias and grammar together forbid them all")
        return logits

    def _choose(self, logits: Logits, position: int) -> int:
        if self.is_greedy:
            return int(logits.argmax())
        if self.params.mirostat:
            return self._mirostat(logits, position)
        candidates = self._filtered(logits, position)
        u = uniform(self.seed, position, _DRAW)
        if candidates is None:
            return draw_from_all(logits, self.params.temperature, u)
        return int(candidates.ids[filters.draw(candidates, self.params.temperature, u)])

    def _filtered(self, logits: Logits, position: int) -> Candidates | None:
        """What the filters leave; None when there are none to apply."""
        p, keep = self.params, self.params.min_keep
        with_xtc = p.xtc_probability > 0.0 and uniform(self.seed, position, _XTC) <= p.xtc_probability
        if p.top_k > 0:
            candidates = filters.top_p(filters.typical(top(logits, p.top_k), p.typical_p, keep), p.top_p, keep)
        elif p.typical_p < 1.0:
            everything = ranked(logits, np.flatnonzero(logits > -np.inf))
            candidates = filters.top_p(filters.typical(everything, p.typical_p, keep), p.top_p, keep)
        elif p.top_p < 1.0:
            candidates = filters.nucleus(logits, p.top_p, keep)
        elif p.min_p > 0.0:
            candidates = filters.likely(logits, p.min_p, keep)
        elif with_xtc:
            candidates = ranked(logits, np.flatnonzero(logits > -np.inf))
        else:
            return None
        candidates = filters.min_p(candidates, p.min_p, keep)
        return filters.xtc(candidates, p.xtc_threshold, keep) if with_xtc else candidates

    def _mirostat(self, logits: Logits, position: int) -> int:
        """Mirostat 2: drop what surprises by more than mu bits, draw, and move mu so that surprise nears tau."""
        temperature = self.params.temperature
        total = log_total(logits, 1.0 / temperature)
        floor = temperature * (total - self.mu * math.log(2.0))
        candidates = at_least(logits, floor) if floor <= float(logits.max()) else top(logits, 1)
        place = filters.draw(candidates, temperature, uniform(self.seed, position, _DRAW))
        surprise = -math.log2(filters.probabilities(candidates, temperature)[place])
        self.mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        return int(candidates.ids[place])

    def _remember(self, token: int) -> None:
        self._history.push(token)
        if self._counts is not None:
            self._counts.push(self._history)


def score(logits: Logits, token: int, n_top: int) -> SampledToken:
    """A known token with its log-probability under float32[n_vocab] raw logits, and the `n_top` best alternatives."""
    total = log_total(logits)
    best = top(logits, n_top) if n_top else None
    alternatives = (
        ()
        if best is None
        else tuple(TokenLogprob(int(i), min(0.0, float(v) - total)) for i, v in zip(best.ids, best.logits, strict=True))
    )
    return SampledToken(token, min(0.0, float(logits[token]) - total), alternatives)


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
