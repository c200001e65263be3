"""What models say about themselves: weights, caches, inputs, refusals; and that a cut changes nothing."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.engine.builder import GraphBuilder
from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType, Op, TensorFlag
from app.engine.gguf.layout import ValueType
from app.engine.gguf.reader import GGUFFile
from app.engine.gguf.writer import Typed, write_gguf
from app.engine.graph import Graph, leaf
from app.engine.models import registry
from app.engine.models.base import (
    EMBEDDING_LAYER,
    SHARED_LAYER,
    BatchShape,
    CacheSpec,
    InputKind,
    Model,
    StageShape,
    StageTensors,
)
from app.errors import ConfigError, FormatError, UnsupportedModel
from tests.engine.models.make_goldens import tokens
from tests.engine.models.runner import Runner
from tests.fakes.architectures import HEAD, N_EMBD, N_KV_HEADS, RECIPES, write_model
from tests.fakes.gguf import TinyLlama, vocabulary, write_tiny_llama
from tests.support import goldens_dir

BATCH = BatchShape(n_tokens=6, n_kv=256, n_outputs=2)


@pytest.fixture
def make(tmp_path: Path):
    def made(name: str, without: tuple[str, ...] = (), n_ctx: int | None = None, **changes: object) -> Model:
        return registry.load(GGUFFile.open(write_model(tmp_path / "m.gguf", name, without, **changes)), n_ctx=n_ctx)

    return made


def stage_tensors(model: Model, batch: BatchShape, stage: StageShape) -> StageTensors:
    weights = {spec.name: leaf(spec.type, spec.ne, spec.name) for spec in model.weights()}
    caches = {spec.name: spec.leaf(512, GGMLType.F16) for spec in model.caches()}
    return StageTensors(weights, caches, {spec.kind: spec.leaf() for spec in model.inputs(batch, stage)})


def ops(model: Model, stage: StageShape, batch: BatchShape = BATCH) -> Counter[str]:
    g = GraphBuilder()
    model.build(g, batch, stage, stage_tensors(model, batch, stage))
    return Counter(node.op.name for node in g.graph.nodes if not node.is_view_op)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_without_an_output_all_caches_are_written_and_the_head_is_not_read(make, name: str) -> None:
    model, g = make(name), GraphBuilder()
    stage = StageShape(0, model.n_layers, is_last=True)
    tensors = stage_tensors(model, BATCH, stage)
    model.build(g, BATCH, stage, tensors)
    caches = {id(cache) for cache in tensors.caches.values()}

    def written(graph: Graph) -> list[int]:
        owners = [id(node.view_src) for node in graph.nodes if not node.is_view_op]
        return [owner for owner in owners if owner in caches]

    effects = g.graph.effects()
    assert written(effects) == written(g.graph) and set(written(effects)) == caches
    reached = {source.name for node in effects.nodes for source in node.src if source is not None}
    assert not reached & {"output.weight", "output_norm.weight", "token_embd.weight"}
    assert len(effects.nodes) < len(g.graph.nodes) and "x" in reached


# Facts.


def test_facts_of_a_llama(make) -> None:
    model = make("llama-linear")
    assert (model.architecture, model.n_layers, model.n_embd) == ("llama", 2, N_EMBD)
    assert (model.n_vocab, model.n_ctx_train) == (len(vocabulary()), 2048)
    assert (model.has_state, model.position_streams, model.embed_scale, model.windows) == (False, 1, 1.0, ())
    assert model.unused_tensors == ()


def test_weights_stand_with_their_layers(make) -> None:
    specs = make("llama-longrope-long", n_ctx=512).weights()
    by_layer = Counter(spec.layer for spec in specs)
    assert by_layer == {EMBEDDING_LAYER: 1, SHARED_LAYER: 1, 0: 9, 1: 9, 2: 2}
    assert [s.name for s in specs if s.layer == SHARED_LAYER] == ["rope_factors_long.weight"]
    assert {s.name for s in specs if s.layer == 2} == {"output_norm.weight", "output.weight"}
    assert all(s.type is GGMLType.F32 for s in specs)


def test_the_context_chooses_the_rope_factors(make) -> None:
    names = {n_ctx: make("llama-longrope-long", n_ctx=n_ctx).rope_factors for n_ctx in (128, 129)}
    assert names == {128: "rope_factors_short.weight", 129: "rope_factors_long.weight"}


def test_tied_embeddings_are_sent_to_the_head_and_an_own_head_is_used(tmp_path: Path) -> None:
    tied = GGUFFile.open(write_tiny_llama(tmp_path / "tied.gguf", TinyLlama(tied=True)))
    embeddings = next(t for t in TinyLlama(tied=True).tensors() if t.name == "token_embd.weight")
    spec = TinyLlama(tied=True)
    explicit = [*spec.tensors(), replace(embeddings, name="output.weight")]
    other = [*spec.tensors(), replace(embeddings, name="output.weight", data=-np.asarray(embeddings.data).view("<f4"))]
    copy = GGUFFile.open(write_gguf(tmp_path / "copy.gguf", spec.metadata(), explicit))
    negative = GGUFFile.open(write_gguf(tmp_path / "negative.gguf", spec.metadata(), other))
    logits = []
    for file in (tied, copy, negative):
        with closing(Runner(NumpyDevice(), file)) as runner:
            logits.append(runner.logits([1, 2, 3]))
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], -logits[2])
    layers = [s.layer for s in registry.load(tied).weights() if s.name == "token_embd.weight"]
    assert layers == [EMBEDDING_LAYER, 2]


def test_caches_of_attention_and_of_recurrent_layers(make) -> None:
    caches = make("qwen3next").caches()
    assert [(c.name, c.kind, c.per) for c in caches[:2]] == [
        ("cache_r_l0", "conv", "slot"),
        ("cache_s_l0", "ssm", "slot"),
    ]
    assert [(c.name, c.kind, c.per, c.row_elements, c.type) for c in caches if c.layer == 1] == [
        ("cache_k_l1", "k", "cell", N_KV_HEADS * HEAD, None),
        ("cache_v_l1", "v", "cell", N_KV_HEADS * HEAD, None),
    ]
    assert (caches[0].row_elements, caches[1].row_elements) == (3 * (2 * 32 + 64), 16 * 64)
    assert {c.type for c in caches if c.per == "slot"} == {GGMLType.F32}


def test_a_cache_type_must_suit_the_head() -> None:
    spec = CacheSpec("cache_k_l0", 0, "k", 80, None, "cell", head_elements=40)
    assert spec.leaf(256, GGMLType.F16).ne == (80, 256, 1, 1)
    with pytest.raises(ConfigError, match="Q8_0 has blocks of 32 elements, which heads of 40 elements do not fill"):
        spec.leaf(256, GGMLType.Q8_0)


# Inputs.


def test_inputs_by_stage(make) -> None:
    model = make("llama-linear")

    def kinds(first: int, last: int, is_last: bool) -> list[str]:
        return [spec.kind.value for spec in model.inputs(BATCH, StageShape(first, last, is_last))]

    layers = ["x", "positions", "kv_rows", "mask"]
    assert kinds(0, 1, False) == layers
    assert kinds(1, 2, False) == kinds(1, 2, True) == [*layers, "out_ids"]
    assert kinds(2, 2, True) == ["x"]


def test_the_head_alone_is_fed_the_rows_that_need_logits(make) -> None:
    model = make("llama-linear")
    [x] = model.inputs(BATCH, StageShape(2, 2, True))
    assert x.ne == (N_EMBD, 2, 1, 1)
    shapes = {spec.kind: spec.ne for spec in model.inputs(BATCH, StageShape(0, 2, True))}
    assert shapes[InputKind.X] == (N_EMBD, 6, 1, 1) and shapes[InputKind.MASK] == (256, 6, 1, 1)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gemma3-softcap", {InputKind.MASK_SWA}),
        ("mistral3", {InputKind.ATTN_SCALE}),
        ("qwen3next", {InputKind.STATE_SLOTS, InputKind.STATE_ROWS}),
        ("smollm3", set()),
    ],
)
def test_inputs_of_special_architectures(make, name: str, more: set[InputKind]) -> None:
    model = make(name)
    stage = StageShape(0, model.n_layers, True)
    usual = {InputKind.X, InputKind.POSITIONS, InputKind.KV_ROWS, InputKind.MASK, InputKind.OUT_IDS}
    assert model.input_kinds(stage) == usual | more


def test_a_stage_of_unrotated_layers_needs_no_positions(make) -> None:
    model = make("smollm3")
    assert InputKind.POSITIONS not in model.input_kinds(StageShape(3, 4, False))


def test_the_temperature_of_queries(make) -> None:
    model = make("mistral3")
    assert [model.attn_scale(p) for p in (0, 15)] == [1.0, 1.0]
    assert model.attn_scale(16) == pytest.approx(1 + 0.4 * np.log(2))


# Graphs.


def test_ops_of_a_llama_layer_are_those_of_upstream(make) -> None:
    assert ops(make("llama-linear"), StageShape(0, 1, False)) == {
        "RMS_NORM": 2, "MUL": 2, "MUL_MAT": 7, "ROPE": 2, "SET_ROWS": 2, "FLASH_ATTN_EXT": 1, "ADD": 2, "GLU": 1,
    }  # fmt: skip


def test_order_around_the_cache_lets_devices_fuse(make) -> None:
    g, stage = GraphBuilder(), StageShape(0, 1, False)
    model = make("llama-linear")
    model.build(g, BATCH, stage, stage_tensors(model, BATCH, stage))
    order = [node.op for node in g.graph.nodes]
    at = order.index(Op.SET_ROWS)
    assert order[at - 2 : at + 3] == [Op.ROPE, Op.VIEW, Op.SET_ROWS, Op.VIEW, Op.SET_ROWS]
    assert order[:2] == [Op.RMS_NORM, Op.MUL]


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_ends_in_a_flagged_result_of_the_promised_shape(make, name: str) -> None:
    model = make(name)
    n = model.n_layers
    for stage, width, rows in (
        (StageShape(0, 1, False), N_EMBD, 6),
        (StageShape(0, n, False), N_EMBD, 2),
        (StageShape(0, n, True), model.n_vocab, 2),
        (StageShape(n, n, True), model.n_vocab, 2),
        (StageShape(0, n, True, hidden=True), N_EMBD, 2),
    ):
        out = model.build(GraphBuilder(), BATCH, stage, stage_tensors(model, BATCH, stage))
        assert out.ne == (width, rows, 1, 1) and out.type is GGMLType.F32
        assert out.flags & TensorFlag.OUTPUT and out.view_src is None


@pytest.mark.parametrize("name", RECIPES)
def test_the_graph_does_not_depend_on_how_many_cells_are_seen(make, name: str) -> None:
    """Nodes line up for every n_kv, and so do the parameters: what changes per step is data."""
    model = make(name)
    stage = StageShape(0, model.n_layers, True)
    graphs = []
    for n_kv in (256, 512):
        g, batch = GraphBuilder(), replace(BATCH, n_kv=n_kv)
        model.build(g, batch, stage, stage_tensors(model, batch, stage))
        graphs.append([(node.op, node.params) for node in g.graph.nodes])
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("name", ["llama-yarn", "gemma3-softcap", "qwen3next", "granitemoe"])
def test_a_cut_anywhere_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", name))
    n = RECIPES[name].n_layers
    whole: list[np.ndarray] = []
    for cuts in ((), (1,), (n,), tuple(range(1, n + 1))):
        with closing(Runner(NumpyDevice(), file, cuts=cuts)) as runner:
            got = [runner.logits(tokens()[:9], [3, 8]), runner.logits(tokens()[9:10])]
        whole = whole or got
        assert all(np.array_equal(a, b) for a, b in zip(got, whole, strict=True)), cuts


def test_hidden_states_are_what_the_head_reads(tmp_path: Path) -> None:
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "llama-linear"))
    with closing(Runner(NumpyDevice(), file)) as runner:
        logits = runner.batch({0: [5, 6, 7]})
        runner.forget()
        hidden = runner.batch({0: [5, 6, 7]}, hidden=True)
    head = np.frombuffer(file.data("output.weight"), "<f4").reshape(-1, N_EMBD)
    assert np.allclose(hidden @ head.T, logits, atol=1e-4)


# Refusals.


def test_an_unknown_architecture_is_refused_by_name_with_the_list(make) -> None:
    with pytest.raises(UnsupportedModel, match=r"architecture 'zzz' is not supported; known are gemma3, .*llama"):
        make("llama-linear", **{"general.architecture": "zzz"})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"llama.block_count": None}, r"'llama\.block_count' is missing"),
        ({"llama.block_count": "two"}, r"'llama\.block_count' holds str, expected an integer"),
        ({"llama.block_count": 3}, r"missing tensor 'blk\.2\.attn_norm\.weight', expected with shape \[64\]"),
        ({"llama.block_count": 600}, "600 blocks"),
        ({"llama.nextn_predict_layers": 2}, "2 of them for prediction"),
        ({"llama.embedding_length": 0}, "0 channels"),
        ({"llama.embedding_length": 128}, r"'token_embd\.weight' has shape \[64, 265\], .* say \[128, 265\]"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"llama.attention.head_count_kv": 3}, "block 0 has 4 heads, which 3 key-value heads cannot share"),
        ({"llama.attention.head_count_kv": 4}, r"'blk\.0\.attn_k\.weight' has shape \[64, 32\], .* say \[64, 64\]"),
        ({"llama.attention.head_count": [4, 4, 4]}, "has 3 values, expected 2"),
        ({"llama.attention.key_length": 0}, "heads of 0 and 16 channels"),
        ({"llama.rope.dimension_count": 7}, "7 of which are rotated"),
        ({"llama.rope.dimension_count": 18}, "18 of which are rotated"),
        ({"llama.context_length": 0}, "a context of 0 tokens"),
        ({"llama.context_length": 1 << 31}, "a context of 2147483648 tokens"),
        ({"llama.rope.freq_base": 0.0}, r"llama\.rope\.freq_base is 0\.0, expected more than 1"),
        ({"llama.rope.freq_base": math.nan}, r"freq_base is nan, expected a finite number"),
        ({"llama.rope.scaling.factor": -2.0}, r"llama\.rope\.scaling\.factor is -2\.0, expected more than 0"),
        ({"llama.rope.scaling.factor": math.inf}, r"factor is inf, expected a finite number"),
        ({"llama.rope.scaling.original_context_length": -5}, r"original_context_length is -5, expected 1 to"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, r"rms_epsilon is -1\.0, expected a small positive number"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
        ({"llama.rope.scaling.type": "spiral"}, "rope scaling 'spiral' is not supported"),
        ({"llama.expert_count": 4}, "expert_used_count' is missing"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 5}, "5 of 4 experts"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon' is missing"),
    ],
)
def test_hyperparameters_that_make_no_sense(make, changes: dict[str, object], match: str) -> None:
    with pytest.raises((FormatError, UnsupportedModel), match=match):
        make("llama-linear", **changes)


def test_expert_sizes_may_be_written_once_per_block_if_they_agree(make) -> None:
    assert make("mixtral", **{"llama.expert_used_count": [2, 2]}).mixture.n_used == 2
    with pytest.raises(UnsupportedModel, match=r"llama\.expert_used_count differs between blocks"):
        make("mixtral", **{"llama.expert_used_count": [2, 3]})


def test_a_missing_tensor_and_one_with_transposed_dimensions(make, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"missing tensor 'blk\.1\.ffn_up\.weight', expected with shape \[64, 96\]"):
        make("llama-linear", without=("blk.1.ffn_up.weight",))
    spec = TinyLlama()
    turned = [replace(t, dims=t.dims[::-1]) if t.name == "blk.0.ffn_up.weight" else t for t in spec.tensors()]
    with pytest.raises(FormatError, match=r"'blk\.0\.ffn_up\.weight' has shape \[128, 64\], .* say \[64, 128\]"):
        registry.load(GGUFFile.open(write_gguf(tmp_path / "t.gguf", spec.metadata(), turned)))


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_norm.weight"])
def test_a_norm_that_is_not_f32_is_refused_as_the_model_loads(tmp_path: Path, name: str) -> None:
    spec = TinyLlama()
    halved = [
        replace(t, type=GGMLType.F16, data=np.ones(64, np.float16)) if t.name == name else t for t in spec.tensors()
    ]
    with pytest.raises(UnsupportedModel, match=rf"tensor '{name}' has type F16; norms, .* must be F32"):
        registry.load(GGUFFile.open(write_gguf(tmp_path / "h.gguf", spec.metadata(), halved)))


def test_a_weight_of_integers_is_refused(tmp_path: Path) -> None:
    spec = TinyLlama()
    odd = [
        replace(t, type=GGMLType.I32, data=np.zeros(64, np.int32)) if t.name == "output_norm.weight" else t
        for t in spec.tensors()
    ]
    with pytest.raises(UnsupportedModel, match="has type I32"):
        registry.load(GGUFFile.open(write_gguf(tmp_path / "t.gguf", spec.metadata(), odd)))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("ssm.inner_size", 65, "do not make an inner size of 65"),
        ("ssm.group_count", 3, "4 value heads of 16 on 3 key heads"),
        ("ssm.conv_kernel", 1, "makes no sense"),
        ("ssm.state_size", None, "missing"),
    ],
)
def test_delta_nets_that_make_no_sense(make, key: str, value: object, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        make("qwen3next", **{f"qwen3next.{key}": value})


def test_prediction_blocks_are_recognised_and_left_out() -> None:
    model = registry.load(GGUFFile.open(goldens_dir() / "models" / "qwen35-mtp-Q5_K_M.gguf"))
    assert model.n_layers == 3
    assert model.unused_tensors and all(name.startswith("blk.3.") for name in model.unused_tensors)
    assert not {spec.name for spec in model.weights()} & set(model.unused_tensors)


@pytest.mark.parametrize("n_blocks", [0, 513, 536_870_914, 2**32 - 1])
def test_an_absurd_number_of_blocks_is_refused_at_once(tmp_path: Path, n_blocks: int) -> None:
    """Nothing may be made once per block before the number is known to make sense."""
    extra = {"llama.block_count": Typed(ValueType.UINT32, n_blocks)}
    path = write_tiny_llama(tmp_path / "wrong.gguf", TinyLlama(extra=extra))
    tracemalloc.start()
    with GGUFFile.open(path) as gguf, pytest.raises(FormatError, match=f"{n_blocks} blocks"):
        registry.load(gguf)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 32 << 20
