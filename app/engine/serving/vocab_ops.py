"""The steps of sampling that touch the whole vocabulary: by native code where it is built, by numpy elsewhere.

Both give the same bits. `logits` are float32[n_vocab], contiguous; ties always go to the lower token id.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.serving import filters
from app.engine.serving.filters import Race
from app.engine.serving.weights import ONE, scaled, weigh

try:
    from app.engine.kernels import _sampling
except ImportError:  # a wheel of Python alone
    NATIVE = False
else:
    NATIVE = True

Logits = NDArray[np.float32]


def best(logits: Logits) -> tuple[int, bool]:
    """The largest logit's token, and whether any logit is NaN (then the token means nothing)."""
    return _sampling.best(logits) if NATIVE else best_numpy(logits)


def top(logits: Logits, k: int) -> list[int]:
    """The tokens of the `k` largest logits (all, if there are fewer), best first."""
    return _sampling.top(logits, k) if NATIVE else top_numpy(logits, k)


def log_total(logits: Logits, scale: float = 1.0) -> float:
    """log(sum(exp(logits * scale))), safe for any finite peak."""
    peak, total = _sampling.total_weight(logits, scale) if NATIVE else total_weight_numpy(logits, scale)
    return peak * scale + math.log(total / ONE)


def draw(logits: Logits, race: Race, u: float) -> tuple[int, float]:
    """The token at `u` in [0, 1) of what the filters leave, and its probability; see `filters.draw`."""
    if not NATIVE:
        return filters.draw(logits, race, u)
    return _sampling.draw(
        logits,
        race.top_k,
        race.typical_p,
        race.top_p,
        race.reach,
        race.xtc_threshold,
        race.min_keep,
        race.scale,
        u,
    )


def best_numpy(logits: Logits) -> tuple[int, bool]:
    return int(logits.argmax()), bool(np.isnan(logits.max()))


def top_numpy(logits: Logits, k: int) -> list[int]:
    found: list[int] = np.argsort(-logits, kind="stable")[:k].tolist()
    return found


def total_weight_numpy(logits: Logits, scale: float) -> tuple[float, float]:
    """The largest logit, and the sum of weights (see `weights`)."""
    peak = logits.max()
    return float(peak), float(int(weigh(scaled(peak - logits, scale)).sum()))
