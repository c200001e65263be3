"""Blocks behind the last layer that predict further tokens: told apart from layers by what they hold."""

from __future__ import annotations

import re

from app.engine.models.hparams import Hyperparameters, Keys

_OF_A_BLOCK = re.compile(r"blk\.(?P<block>\d{1,9})\.(?P<prediction>nextn\.)?")


def check_prediction_blocks(keys: Keys, p: Hyperparameters) -> None:
    """The file's count of prediction blocks must agree with its tensors; a layer too few or too many would go unseen.

    Prediction blocks whose tensors were cut away are fine. Raises FormatError.
    """
    found: dict[int, bool] = {}
    for name in keys.gguf.tensors:
        if match := _OF_A_BLOCK.match(name):
            block = int(match["block"])
            found[block] = found.get(block, False) or match["prediction"] is not None
    for block, predicts in sorted(found.items()):
        if block < p.n_blocks and predicts != (block >= p.n_layers):
            held = "tensors for prediction" if predicts else "a layer's tensors and none for prediction"
            raise keys.error(
                f"block {block} holds {held}, but {keys.architecture}.nextn_predict_layers is "
                f"{p.n_blocks - p.n_layers} of {p.n_blocks} blocks; the file is badly converted"
            )
