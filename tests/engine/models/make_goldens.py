"""Makes `data/architectures.npz`: logits of llama.cpp for the tiny models of `tests/fakes/architectures.py`.

    python -m tests.engine.models.make_goldens

Needs the package llama-cpp-python (made with 0.3.36). Float32 weights and cache and no flash attention: the only
rounding is that of float32.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np

from tests.fakes.architectures import RECIPES, write_model
from tests.fakes.gguf import vocabulary

DATA = Path(__file__).with_name("data") / "architectures.npz"
N_TOKENS = 40
N_CTX = 512
ROWS = (0, 17, 39)
COLUMNS = slice(0, None, 5)


def tokens() -> list[int]:
    return [int(t) for t in np.random.Generator(np.random.PCG64(7)).integers(0, len(vocabulary()) - 3, N_TOKENS)]


def digest(path: Path) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(path.read_bytes()).digest(), np.uint8)


def main() -> None:
    import llama_cpp

    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RECIPES:
            path = write_model(Path(folder) / f"{name}.gguf", name)
            model = llama_cpp.Llama(
                str(path), n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX, n_threads=1, logits_all=True,
                type_k=0, type_v=0, flash_attn=False, verbose=False,
            )  # fmt: skip
            model.eval(tokens())
            found[name] = np.array(model.scores, np.float32)[list(ROWS), COLUMNS]
            found[f"{name} sha256"] = digest(path)
            print(name, found[name].std())
            model.close()
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, **found)


if __name__ == "__main__":
    main()
