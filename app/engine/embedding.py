"""Token embeddings: rows looked up by the control plane, straight from the model file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import GGMLType, row_bytes
from app.engine.gguf.quants import dequantize
from app.engine.gguf.reader import GGUFFile
from app.engine.models.base import EMBEDDING_LAYER, Model


class TokenEmbedding:
    """The embedding matrix of a file, read row by row; only pages of tokens that occur are ever touched."""

    def __init__(self, raw: memoryview, type_: GGMLType, n_embd: int, n_vocab: int, scale: float) -> None:
        self.n_embd = n_embd
        self._type = type_
        self._scale = np.float32(scale)
        self._table = np.frombuffer(raw, dtype=np.uint8).reshape(n_vocab, row_bytes(type_, n_embd))

    @classmethod
    def of(cls, gguf: GGUFFile, model: Model) -> TokenEmbedding:
        """The token embeddings of a model's file."""
        spec = next(spec for spec in model.weights() if spec.layer == EMBEDDING_LAYER)
        return cls(gguf.data(spec.name), spec.type, spec.ne[0], spec.ne[1], model.embed_scale)

    def rows(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Embeddings [len(tokens), n_embd], float32, in memory of their own."""
        rows = dequantize(self._type, self._table[tokens])
        return rows if self._scale == 1 else rows * self._scale
