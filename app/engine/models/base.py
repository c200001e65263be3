"""What a model is to the engine: its weights, its caches, and a graph for any run of its layers.

A model file of this package reads hyperparameters once and is pure from then on: `build` adds ggml ops to a graph and
touches no memory. A stage is a contiguous run of layers on one device; every stage is built on its own, from leaves.

What stands where (`n` tokens in the ubatch, `o` rows that need logits, `c` cache cells that attention sees, `s`
sequences):

    kind         type  shape            content
    x            F32   [n_embd, n]      embedding rows times `embed_scale`, or what the stage before returned
    positions    I32   [n]              position of each token; [4n] when `position_streams` is 4: runs p, p, p, 0
    kv_rows      I64   [n]              cache cell each token's key and value go to
    mask         F16   [c, n]           0 where the token may look, -inf elsewhere
    mask_swa     F16   [c, n]           the same for layers with a sliding window: `windows[0]` cells, itself included
    out_ids      I32   [o]              rows of the ubatch that need logits; where the model's last layer stands
    state_slots  I32   [s]              state row each sequence reads (one that holds zeros for a new sequence)
    state_rows   I64   [s]              state row each sequence writes
    attn_scale   F32   [1, 1, n]        `attn_scale(position)` of each token

The rows that need logits are gathered inside the last layer, so what leaves it is [n_embd, o], also when the output
head stands alone on a stage behind it (that stage's `x` is [n_embd, o]). Shapes are the same however a model is cut.

Caches are [row_elements, n_rows]: a row per cell for keys and values (neither transposed), a row per slot for
recurrent state. Rows are written with SET_ROWS and found by data, never by offsets.

Tokens of a ubatch with recurrent layers are grouped by sequence, each with n_tokens / n_seqs tokens. A ubatch may be
padded by sequences (which read and write a scratch row), not by tokens: a padding token would enter the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from app.engine.builder import GraphBuilder
from app.engine.ggml import TRAITS, GGMLType, Shape
from app.engine.graph import Tensor, leaf, shape4
from app.errors import ConfigError

#: `WeightSpec.layer` of the token embeddings, which the control plane reads row by row from the file.
EMBEDDING_LAYER = -1
#: `WeightSpec.layer` of weights that every stage with layers gets a copy of.
SHARED_LAYER = -2


class InputKind(StrEnum):
    """What a stage is fed each step; the module's docstring says what each holds."""

    X = "x"
    POSITIONS = "positions"
    KV_ROWS = "kv_rows"
    MASK = "mask"
    MASK_SWA = "mask_swa"
    OUT_IDS = "out_ids"
    STATE_SLOTS = "state_slots"
    STATE_ROWS = "state_rows"
    ATTN_SCALE = "attn_scale"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the file and the layer it belongs to.

    `layer` is a block index; `n_layers` for the output norm and head; EMBEDDING_LAYER for the token embeddings;
    SHARED_LAYER for what every stage with layers needs. A tied output head is a second entry of the same name.
    """

    name: str
    type: GGMLType
    ne: Shape
    layer: int


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache tensor of one layer. `type` None: as the user chose for keys or values.

    `head_elements` is the smallest piece of a row that is read alone: blocks of a quantized type must not straddle it.
    """

    name: str
    layer: int
    kind: Literal["k", "v", "conv", "ssm"]
    row_elements: int
    type: GGMLType | None
    per: Literal["cell", "slot"]
    head_elements: int = 0

    def leaf(self, n_rows: int, chosen_type: GGMLType) -> Tensor:
        """The cache as a graph sees it; `chosen_type` counts only where the model leaves the type open.

        Raises ConfigError if the type does not suit the model's head size.
        """
        type_ = chosen_type if self.type is None else self.type
        block = TRAITS[type_].block_elements
        if self.head_elements % block:
            raise ConfigError(
                f"cache type {type_.name} has blocks of {block} elements, which heads of {self.head_elements} elements "
                f"do not fill; choose f16 with --cache-type-k and --cache-type-v"
            )
        return leaf(type_, (self.row_elements, n_rows), self.name)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape bucket a graph is built for. With recurrent layers every sequence has n_tokens / n_seqs tokens."""

    n_tokens: int
    n_kv: int
    n_outputs: int
    n_seqs: int = 1

    @property
    def seq_tokens(self) -> int:
        return self.n_tokens // self.n_seqs


@dataclass(frozen=True, slots=True)
class StageShape:
    """Layers [first_layer, last_layer) and, on the last stage, the output norm and head. May hold no layer at all.

    `hidden`: the last stage returns the rows after the output norm instead of logits (for embeddings).
    """

    first_layer: int
    last_layer: int
    is_last: bool
    hidden: bool = False

    @property
    def has_layers(self) -> bool:
        return self.last_layer > self.first_layer

    @property
    def layers(self) -> str:
        """As people are told: `0-14`, `15-29 + head`."""
        layers = f"{self.first_layer}-{self.last_layer - 1}" if self.has_layers else "none"
        return layers + (" + head" if self.is_last else "")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input leaf of a stage, for one shape bucket."""

    kind: InputKind
    type: GGMLType
    ne: Shape

    def leaf(self) -> Tensor:
        return leaf(self.type, self.ne, self.kind.value)


@dataclass(frozen=True, slots=True)
class StageTensors:
    """The leaves of one stage: weights and caches by name, inputs by kind."""

    weights: Mapping[str, Tensor]
    caches: Mapping[str, Tensor]
    inputs: Mapping[InputKind, Tensor]


class Model(ABC):
    """A model as the engine runs it. Made by `registry.load`, which checks every weight against the hyperparameters."""

    name: str  # general.name, or the architecture
    architecture: str
    n_layers: int  # without next-token-prediction blocks
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    has_state: bool = False  # some layers are recurrent
    position_streams: int = 1
    embed_scale: float = 1.0  # the control plane multiplies embedding rows by it
    unused_tensors: tuple[str, ...] = ()  # tensors of the file that no graph reads, such as prediction blocks
    windows: tuple[int, ...] = ()  # distinct sliding windows in tokens, the token itself included; at most one

    @abstractmethod
    def weights(self) -> list[WeightSpec]:
        """Every tensor the graphs use, in layer order."""

    @abstractmethod
    def caches(self) -> list[CacheSpec]:
        """Every cache tensor, in layer order."""

    @abstractmethod
    def input_kinds(self, stage: StageShape) -> frozenset[InputKind]:
        """What this stage must be fed."""

    @abstractmethod
    def build(self, g: GraphBuilder, batch: BatchShape, stage: StageShape, tensors: StageTensors) -> Tensor:
        """Add the stage's ops to `g`; the result is flagged OUTPUT.

        Returns the residual [n_embd, n_tokens], [n_embd, n_outputs] once the model's last layer is behind it, or on
        the last stage the logits [n_vocab, n_outputs], F32.
        """

    def attn_scale(self, position: int) -> float:
        """What queries at this position are multiplied by; fed as the input of that name where it is listed."""
        del position
        return 1.0

    def inputs(self, batch: BatchShape, stage: StageShape) -> tuple[InputSpec, ...]:
        """The input leaves of a stage, in the order of `InputKind`."""
        kinds = self.input_kinds(stage)
        return tuple(self._input(kind, batch, stage) for kind in InputKind if kind in kinds)

    def _input(self, kind: InputKind, batch: BatchShape, stage: StageShape) -> InputSpec:
        n = batch.n_tokens
        x_rows = n if stage.first_layer < self.n_layers else batch.n_outputs
        table: dict[InputKind, tuple[GGMLType, tuple[int, ...]]] = {
            InputKind.X: (GGMLType.F32, (self.n_embd, x_rows)),
            InputKind.POSITIONS: (GGMLType.I32, (self.position_streams * n,)),
            InputKind.KV_ROWS: (GGMLType.I64, (n,)),
            InputKind.MASK: (GGMLType.F16, (batch.n_kv, n)),
            InputKind.MASK_SWA: (GGMLType.F16, (batch.n_kv, n)),
            InputKind.OUT_IDS: (GGMLType.I32, (batch.n_outputs,)),
            InputKind.STATE_SLOTS: (GGMLType.I32, (batch.n_seqs,)),
            InputKind.STATE_ROWS: (GGMLType.I64, (batch.n_seqs,)),
            InputKind.ATTN_SCALE: (GGMLType.F32, (1, 1, n)),
        }
        type_, dims = table[kind]
        return InputSpec(kind, type_, shape4(dims))
