"""How well a document answers a query, by models that were trained to say it: a small head over the hidden state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.engine.ggml import row_bytes
from app.engine.gguf.quants import dequantize
from app.engine.text.guard import Guard
from app.engine.text.vocab import as_text

if TYPE_CHECKING:
    from app.engine.gguf.reader import GGUFFile
    from app.engine.text.tokenizer import Tokenizer

_TEMPLATE_KEY = "tokenizer.chat_template.rerank"
_PLACES = re.compile(r"\{(query|document)\}")


@dataclass(frozen=True, slots=True)
class Layer:
    """`weight` [n_out, n_in] and `bias` [n_out], float32."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    @classmethod
    def of(cls, gguf: GGUFFile, name: str) -> Layer | None:
        """The layer of that name in a file, if it is there."""
        weight = _rows(gguf, f"{name}.weight")
        if weight is None:
            return None
        bias = _rows(gguf, f"{name}.bias")
        return cls(weight, np.zeros(len(weight), np.float32) if bias is None else bias.reshape(-1))

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(self.weight @ x + self.bias, dtype=np.float32)


class Ranking:
    """The head of a model that ranks, and the prompt it ranks by. `label` is the one that says yes.

    `dense`, where there is one, comes first and is squashed by tanh, as in BERT's pooler.
    """

    def __init__(self, head: Layer, dense: Layer | None, template: str | None, label: int, guard: Guard) -> None:
        self._head = head
        self._dense = dense
        self._template = template
        self._label = label
        self._guard = guard

    @classmethod
    def of(cls, gguf: GGUFFile, tokenizer: Tokenizer) -> Ranking | None:
        """What a file has of it; None for models that do not rank."""
        head = Layer.of(gguf, "cls.output")
        if head is None:
            return None
        metadata = gguf.metadata
        template = metadata.get(_TEMPLATE_KEY)
        label = min(_yes_label(metadata), len(head.weight) - 1)
        text = None if template is None else as_text(template)
        return cls(head, Layer.of(gguf, "cls"), text, label, Guard(tokenizer.control_texts))

    def tokens(self, query: str, document: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The prompt whose last hidden state tells. What it quotes cannot become control tokens."""
        said = {"query": self._guard.protect(query), "document": self._guard.protect(document)}
        if self._template is not None:
            text = _PLACES.sub(lambda place: said[place[1]], self._template)
            return tuple(tokenizer.encode(text, add_special=False, parse_special=True))
        ids: list[int] = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        for text in said.values():
            ids += tokenizer.encode(text, add_special=False, parse_special=True)
            ids += [tokenizer.eos] if tokenizer.add_eos and tokenizer.eos is not None else []
        return tuple(ids)

    def score(self, hidden: NDArray[np.float32]) -> float:
        """The relevance: of one label the logit as it is, of several the probability of yes. `hidden` is [n_embd]."""
        if self._dense is not None:
            hidden = np.tanh(self._dense(hidden))
        logits = self._head(hidden)
        if len(logits) == 1:
            return float(logits[0])
        odds = np.exp(logits - logits.max())
        return float(odds[self._label] / odds.sum())


def _yes_label(metadata: Mapping[str, Any]) -> int:
    """Where yes stands among the labels; first where nothing is said of them."""
    architecture = as_text(metadata["general.architecture"])
    labels = [as_text(label).lower() for label in metadata.get(f"{architecture}.classifier.output_labels", ())]
    return labels.index("yes") if "yes" in labels else 0


def _rows(gguf: GGUFFile, name: str) -> NDArray[np.float32] | None:
    info = gguf.tensors.get(name)
    if info is None:
        return None
    raw = np.frombuffer(gguf.data(name), dtype=np.uint8).reshape(-1, row_bytes(info.type, info.ne[0]))
    return dequantize(info.type, raw)
