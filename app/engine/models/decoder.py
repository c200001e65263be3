"""The common shape of a decoder: token embeddings, layers of attention and feed-forward, output norm and head.

An architecture is a subclass with a few attributes and methods; what is ordinary stands here.
"""

from __future__ import annotations

from typing import ClassVar

from app.engine.builder import GraphBuilder
from app.engine.ggml import RopeMode
from app.engine.gguf.reader import GGUFFile
from app.engine.graph import Tensor
from app.engine.models.attention import Attention, attention_caches, declare_attention, self_attention
from app.engine.models.base import (
    BatchShape,
    CacheSpec,
    InputKind,
    Model,
    StageShape,
    StageTensors,
    WeightSpec,
)
from app.engine.models.feed_forward import Mixture, declare_gated, declare_mixture, gated, mixture
from app.engine.models.hparams import Keys, read_hyperparameters
from app.engine.models.prediction import check_prediction_blocks
from app.engine.models.rope import read_rope
from app.engine.models.scope import Scope
from app.engine.models.weights import LayerWeights, WeightTable


class Decoder(Model):
    """A pre-norm decoder as llama has it. Subclasses override what is theirs."""

    rope_mode: ClassVar[RopeMode] = RopeMode.NORMAL
    ffn_norm: ClassVar[str] = "ffn_norm"  # the norm in front of the feed-forward part

    def __init__(self, gguf: GGUFFile, n_ctx: int | None = None) -> None:
        self.keys = Keys(gguf)
        self.p = read_hyperparameters(self.keys)
        self.architecture = self.p.architecture
        self.name = self.p.name
        self.n_layers = self.p.n_layers
        self.n_embd = self.p.n_embd
        self.n_vocab = self.p.n_vocab
        self.n_ctx_train = self.p.n_ctx_train
        self.n_ctx = n_ctx or self.n_ctx_train
        self.read()
        if self.p.n_rot == 0 and any(self.attention(layer).rope is not None for layer in range(self.n_layers)):
            raise self.keys.wrong("rope.dimension_count", 0, "an even number of channels, since layers rotate")
        table = WeightTable(gguf)
        self._declare(table)
        self._weights = table.ordered()
        self.unused_tensors = tuple(table.unused())
        check_prediction_blocks(self.keys, self.p)

    # What an architecture says about itself.

    def read(self) -> None:
        """Read keys of one's own and set `rope`, `rope_factors`, `mixture` and the like."""
        self.rope = read_rope(self.keys, self.rope_mode, self.p.n_rot)
        self.rope_factors: str | None = None
        self.mixture = self.read_mixture()

    def read_mixture(self) -> Mixture | None:
        """The experts of layers that have them; each is as wide as the dense part would be."""
        experts = self.p.experts
        return Mixture(experts.n_experts, experts.n_used, self.p.n_ff[0]) if experts is not None else None

    def attention(self, layer: int) -> Attention:
        """How a layer attends."""
        return Attention.of(self.p, layer, self.rope, self.rope_factors)

    # Weights and caches.

    def weights(self) -> list[WeightSpec]:
        return list(self._weights)

    def caches(self) -> list[CacheSpec]:
        return [cache for layer in range(self.n_layers) for cache in self.layer_caches(layer)]

    def _declare(self, table: WeightTable) -> None:
        table.embeddings(self.n_embd, self.n_vocab)
        if self.rope_factors is not None:
            table.shared(self.rope_factors, (self.p.n_rot // 2,))
        for layer in range(self.n_layers):
            self.declare_layer(table.layer(layer))
        table.head(self.n_embd, self.n_vocab, self.n_layers)

    def declare_layer(self, w: LayerWeights) -> None:
        w.need("attn_norm.weight", self.n_embd)
        declare_attention(w, self.attention(w.index), self.n_embd)
        w.need(f"{self.ffn_norm}.weight", self.n_embd)
        self.declare_feed_forward(w)

    def declare_feed_forward(self, w: LayerWeights) -> None:
        if self.mixture is not None:
            declare_mixture(w, self.mixture, self.n_embd)
        else:
            declare_gated(w, self.n_embd, self.p.n_ff[w.index])

    def layer_caches(self, layer: int) -> list[CacheSpec]:
        return attention_caches(self.attention(layer), layer)

    # Inputs and graphs.

    def input_kinds(self, stage: StageShape) -> frozenset[InputKind]:
        kinds = {InputKind.X}
        for layer in range(stage.first_layer, stage.last_layer):
            kinds |= self.layer_inputs(layer)
        if stage.has_layers and stage.last_layer == self.n_layers:
            kinds.add(InputKind.OUT_IDS)
        return frozenset(kinds)

    def layer_inputs(self, layer: int) -> set[InputKind]:
        a = self.attention(layer)
        kinds = {InputKind.KV_ROWS, InputKind.MASK_SWA if a.windowed else InputKind.MASK}
        if a.rope is not None:
            kinds.add(InputKind.POSITIONS)
        if a.temperature:
            kinds.add(InputKind.ATTN_SCALE)
        return kinds

    def build(self, g: GraphBuilder, batch: BatchShape, stage: StageShape, tensors: StageTensors) -> Tensor:
        x = tensors.inputs[InputKind.X]
        for layer in range(stage.first_layer, stage.last_layer):
            is_last = layer == self.n_layers - 1
            scope = Scope(g, batch, tensors, self.p.eps, layer, f"blk.{layer}.", is_last)
            x = g.label(self.layer(scope, x), f"l_out-{layer}")
        if stage.is_last:
            x = self.head(Scope(g, batch, tensors, self.p.eps, self.n_layers, ""), x, hidden=stage.hidden)
        return g.output(x)

    def layer(self, s: Scope, x: Tensor) -> Tensor:
        """One layer; the last one goes on with the rows that need logits once its tokens are mixed."""
        x = s.g.add(self.mix(s, s.rms_norm(x, "attn_norm")), s.wanted(x))
        f = self.feed_forward(s, s.rms_norm(x, self.ffn_norm))
        return s.g.add(f, x)

    def mix(self, s: Scope, h: Tensor) -> Tensor:
        """What mixes tokens: [n_embd, n] to the wanted rows, [n_embd, n] before the last layer."""
        return self_attention(s, h, self.attention(s.layer))

    def feed_forward(self, s: Scope, h: Tensor) -> Tensor:
        return mixture(s, h, self.mixture) if self.mixture is not None else gated(s, h)

    def head(self, s: Scope, x: Tensor, *, hidden: bool) -> Tensor:
        """The output norm, and unless hidden states are wanted the logits."""
        x = s.g.label(s.rms_norm(x, "output_norm"), "result_norm")
        if hidden:
            return x
        name = "output" if s.optional("output.weight") is not None else "token_embd"
        return s.g.label(s.linear(x, name), "result_output")
