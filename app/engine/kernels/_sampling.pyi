import numpy as np
from numpy.typing import NDArray

def draw(
    logits: NDArray[np.float32],
    top_k: int,
    typical_p: float,
    top_p: float,
    reach: float,
    xtc_threshold: float,
    min_keep: int,
    scale: float,
    u: float,
) -> tuple[int, float]: ...
def select_rows(rows: memoryview, n_columns: int, wishes: bytes, out: memoryview) -> None: ...
def top(logits: NDArray[np.float32], k: int) -> list[int]: ...
def total_weight(logits: NDArray[np.float32], scale: float) -> tuple[float, float]: ...
def best(logits: NDArray[np.float32]) -> tuple[int, bool]: ...
