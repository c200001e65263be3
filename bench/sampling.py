"""What drawing one token costs over a vocabulary of 150k, for every kind of wish, natively and in numpy.

`python -m bench.sampling`: milliseconds per token, the best of many; over logits that are peaked, as a model's are, and
flat, which is the worst case for filters.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from app.engine.request import SamplingParams
from app.engine.rows import WholeRow
from app.engine.serving import vocab_ops
from app.engine.serving.sampler import Sampler

N_VOCAB = 151_936
ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {},
    "temperature alone": ALL,
    "top_k 1000": {**ALL, "top_k": 1000},
    "top_k 5000": {**ALL, "top_k": 5000},
    "top_p 0.95 of all": {**ALL, "top_p": 0.95},
    "min_p 0.05 of all": {**ALL, "min_p": 0.05},
    "typical_p 0.9 of all": {**ALL, "typical_p": 0.9},
    "xtc of all": {**ALL, "xtc_probability": 1.0},
    "mirostat 2": {"mirostat": 2},
    "greedy, 5 logprobs": {"temperature": 0.0, "n_logprobs": 5},
    "repetition penalty": {"repeat_penalty": 1.1},
    "dry": {"dry_multiplier": 0.8},
    "bias": {"temperature": 0.0, "logit_bias": {3: 1.0}},
}


def cost_ms(wish: dict[str, Any], logits: np.ndarray[Any, np.dtype[np.float32]], n_rounds: int) -> float:
    sampler = Sampler(SamplingParams(seed=1, **wish), list(range(500)), n_vocab=N_VOCAB)
    times = []
    for position in range(n_rounds):
        began = time.perf_counter()
        sampler.sample(WholeRow(logits), position)
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(1)
    rows = {name: rng.normal(0, width, N_VOCAB).astype(np.float32) for name, width in (("peaked", 3.0), ("flat", 0.3))}
    print(f"{'ms per token':24}{'native':>18}{'numpy':>18}")
    for name, wish in WISHES.items():
        costs = []
        for vocab_ops.NATIVE in (True, False):
            n_rounds = rounds if vocab_ops.NATIVE else 3
            costs.append("/".join(f"{cost_ms(wish, logits, n_rounds):.3f}" for logits in rows.values()))
        print(f"{name:24}{costs[0]:>18}{costs[1]:>18}", flush=True)


if __name__ == "__main__":
    if not vocab_ops.NATIVE:
        raise SystemExit("the native sampling module is not built: make native")
    main()
