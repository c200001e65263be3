"""The weights of a model: declared by its architecture, checked against the file, listed for the loader."""

from __future__ import annotations

from collections.abc import Iterator

from app.engine.ggml import GGMLType
from app.engine.gguf.quants import DECODERS
from app.engine.gguf.reader import GGUFFile
from app.engine.graph import shape4
from app.engine.models.base import EMBEDDING_LAYER, SHARED_LAYER, WeightSpec
from app.errors import FormatError, UnsupportedModel


def _must_be_f32(name: str, dims: tuple[int, ...]) -> bool:
    """Whether it meets activations in ops that combine float32 with nothing else; matrices may be of other types."""
    is_matrix = len(dims) > 1 or "gate_inp" in name
    return not is_matrix or name.endswith(".bias") or "ssm_conv1d" in name


class WeightTable:
    """Collects what an architecture declares. Raises FormatError for a tensor that is missing or has another shape."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.specs: list[WeightSpec] = []

    def need(self, name: str, dims: tuple[int, ...], layer: int) -> None:
        info = self.gguf.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.gguf.path}: missing tensor {name!r}, expected with shape {list(dims)}")
        expected = shape4(dims)
        if info.ne != expected:
            found = list(info.ne[: max(info.n_dims, 1)])
            raise FormatError(
                f"{self.gguf.path}: tensor {name!r} has shape {found}, the hyperparameters say {list(dims)}"
            )
        if info.type not in DECODERS:
            raise UnsupportedModel(
                f"{self.gguf.path}: tensor {name!r} has type {info.type.name}, which holds no weights"
            )
        if info.type is not GGMLType.F32 and _must_be_f32(name, dims):
            raise UnsupportedModel(
                f"{self.gguf.path}: tensor {name!r} has type {info.type.name}; norms, biases and other vectors must be "
                f"F32, as converters write them; convert the model again"
            )
        self.specs.append(WeightSpec(name, info.type, expected, layer))

    def may(self, name: str, dims: tuple[int, ...], layer: int) -> bool:
        """Declare a tensor that need not be there; says whether it is."""
        if name not in self.gguf.tensors:
            return False
        self.need(name, dims, layer)
        return True

    def embeddings(self, n_embd: int, n_vocab: int) -> None:
        self.need("token_embd.weight", (n_embd, n_vocab), EMBEDDING_LAYER)

    def shared(self, name: str, dims: tuple[int, ...]) -> None:
        self.need(name, dims, SHARED_LAYER)

    def head(self, n_embd: int, n_vocab: int, n_layers: int) -> None:
        """The output norm and head; a file without a head uses the token embeddings."""
        self.need("output_norm.weight", (n_embd,), n_layers)
        if not self.may("output.weight", (n_embd, n_vocab), n_layers):
            self.need("token_embd.weight", (n_embd, n_vocab), n_layers)
        else:
            self.may("output.scale", (1,), n_layers)
            self.may("output.bias", (n_vocab,), n_layers)

    def layer(self, index: int) -> LayerWeights:
        return LayerWeights(self, index)

    def ordered(self) -> list[WeightSpec]:
        """In layer order: embeddings, shared weights, blocks, head."""
        return sorted(self.specs, key=lambda spec: spec.layer)

    def unused(self) -> Iterator[str]:
        """Tensors of the file that no graph reads."""
        used = {spec.name for spec in self.specs}
        return (name for name in self.gguf.tensors if name not in used)


class LayerWeights:
    """Declares the tensors of one block by their names inside it."""

    def __init__(self, table: WeightTable, index: int) -> None:
        self._table = table
        self.index = index

    def _name(self, name: str) -> str:
        return f"blk.{self.index}.{name}"

    def need(self, name: str, *dims: int) -> None:
        self._table.need(self._name(name), dims, self.index)

    def may(self, name: str, *dims: int) -> bool:
        return self._table.may(self._name(name), dims, self.index)

    def has(self, name: str) -> bool:
        return self._name(name) in self._table.gguf.tensors

    def linear(self, name: str, n_in: int, n_out: int) -> None:
        """A matrix, the scale some formats give it, and a bias if there is one."""
        self.need(f"{name}.weight", n_in, n_out)
        self.may(f"{name}.scale", 1)
        self.may(f"{name}.bias", n_out)

    def experts(self, name: str, n_in: int, n_out: int, n_experts: int) -> None:
        """A matrix per expert, likewise."""
        self.need(f"{name}.weight", n_in, n_out, n_experts)
        self.may(f"{name}.scale", n_experts)
        self.may(f"{name}.bias", n_out, n_experts)
