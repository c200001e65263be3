"""ARGSORT and TOP_K. Of equal values the lower index comes first; NaN comes last."""

from __future__ import annotations

import numpy as np

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.ggml import Op, SortOrder


def _argsort(n: Node) -> Step:
    x, out = n.src(0).array, n.out.array
    if n.param(0) == SortOrder.DESC:
        return lambda: np.copyto(out, np.argsort(-x, axis=-1, kind="stable"), casting="same_kind")
    return lambda: np.copyto(out, np.argsort(x, axis=-1, kind="stable"), casting="same_kind")


def _top_k(n: Node) -> Step:
    """The k largest of each row; ggml leaves their order open, here the largest is first."""
    x, out, k = n.src(0).array, n.out.array, n.out.ne[0]
    return lambda: np.copyto(out, np.argsort(-x, axis=-1, kind="stable")[..., :k], casting="same_kind")


BINDERS: dict[Op, Binder] = {Op.ARGSORT: _argsort, Op.TOP_K: _top_k}
