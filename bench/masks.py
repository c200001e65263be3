"""What the mask of a constrained token costs, over a real vocabulary: `python -m bench.masks MODEL.gguf [SCHEMAS]`.

Random schemas, each walked with random allowed tokens. Promised is at most 1 ms per token at a vocabulary of 150,000.
"""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np

from app.engine.gguf.reader import GGUFFile
from app.engine.grammar import Grammars
from app.engine.request import Constraint
from app.engine.text.tokenizer import Tokenizer
from bench.machine import described
from tests.fakes.schemas import random_schema

MAX_TOKENS = 100


def main(path: str, n_schemas: str = "100") -> None:
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(path).metadata)
    grammars, rng, times_ms = Grammars(tokenizer), random.Random(1), []
    for seed in range(int(n_schemas)):
        schema = json.dumps(random_schema(seed))
        matcher = grammars.matcher(Constraint(kind="json_schema", source=schema))
        for _ in range(MAX_TOKENS):
            begun = time.perf_counter()
            mask = matcher.mask()
            times_ms.append((time.perf_counter() - begun) * 1e3)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if matcher.push(int(rng.choice(allowed))):
                break
    tail = "  ".join(f"p{q:g} {np.percentile(times_ms, q):.3f}" for q in (50, 99, 99.9, 100))
    print(f"{described()}; vocabulary of {tokenizer.vocab_size:,}, {len(times_ms):,} masks")
    print(f"milliseconds: mean {np.mean(times_ms):.3f}  {tail}")


if __name__ == "__main__":
    main(*sys.argv[1:])
