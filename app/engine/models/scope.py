"""What the graph of one layer is written with: the builder, the layer's weights by short name, the stage's inputs."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.builder import GraphBuilder
from app.engine.graph import Tensor
from app.engine.models.base import BatchShape, InputKind, StageTensors


@dataclass(frozen=True, slots=True)
class Scope:
    """One layer under construction; `prefix` is what its tensors' names begin with, empty for the head."""

    g: GraphBuilder
    batch: BatchShape
    tensors: StageTensors
    eps: float
    layer: int
    prefix: str
    is_last_layer: bool = False

    def input(self, kind: InputKind) -> Tensor:
        return self.tensors.inputs[kind]

    def weight(self, name: str) -> Tensor:
        return self.tensors.weights[self.prefix + name]

    def optional(self, name: str) -> Tensor | None:
        return self.tensors.weights.get(self.prefix + name)

    def cache(self, kind: str) -> Tensor:
        return self.tensors.caches[cache_name(kind, self.layer)]

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        """The norm, its learned weight, and a bias where the file has one."""
        y = self.g.mul(self.g.rms_norm(x, self.eps), self.weight(f"{name}.weight"))
        bias = self.optional(f"{name}.bias")
        return y if bias is None else self.g.add(y, bias)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A matrix product, times its scale and plus its bias where the file has them."""
        y = self.g.mul_mat(self.weight(f"{name}.weight"), x)
        scale, bias = self.optional(f"{name}.scale"), self.optional(f"{name}.bias")
        if scale is not None:
            y = self.g.mul(y, scale)
        return y if bias is None else self.g.add(y, bias)

    def wanted(self, x: Tensor) -> Tensor:
        """In the model's last layer the rows that need logits, before it all rows."""
        return self.g.get_rows(x, self.input(InputKind.OUT_IDS)) if self.is_last_layer else x


def cache_name(kind: str, layer: int) -> str:
    """Name of a cache tensor; `kind` is k, v, r (convolution state) or s (recurrent state)."""
    return f"cache_{kind}_l{layer}"
