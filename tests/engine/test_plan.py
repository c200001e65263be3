"""Memory by lifetime: live values never overlap, and programs say where everything stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.ggml import GGMLType, Op, TensorFlag, contiguous_strides
from app.engine.graph import Graph, Tensor, leaf
from app.engine.plan import Place, lay_out_scratch, make_program, pack
from app.engine.program import Buffer
from app.errors import InternalError

ALIGNMENT = 32


def node(sources: list[Tensor], n: int, op: Op = Op.ADD) -> Tensor:
    ne = (n, 1, 1, 1)
    return Tensor(GGMLType.F32, ne, contiguous_strides(GGMLType.F32, ne), op, src=tuple(sources))


def view(source: Tensor) -> Tensor:
    return Tensor(source.type, source.ne, source.nb, Op.VIEW, src=(source,), view_src=source.owner)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    graph = Graph()
    inputs = [leaf(GGMLType.F32, (8,), f"in{i}") for i in range(2)]
    for _ in range(draw(st.integers(1, 25))):
        known = inputs + graph.nodes
        sources = [known[draw(st.integers(max(0, len(known) - 8), len(known) - 1))] for _ in range(2)]
        graph.add(view(sources[0]) if draw(st.booleans()) and graph.nodes else node(sources, draw(st.integers(1, 64))))
    graph.add(node([graph.nodes[-1]], 4))
    return graph


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_live_values_never_overlap(graph: Graph) -> None:
    output = graph.nodes[-1]
    layout = lay_out_scratch(graph, output, ALIGNMENT)
    end_of = {at: at for at, n in enumerate(graph.nodes) if n.view_src is None}
    index = {id(n): at for at, n in enumerate(graph.nodes)}
    for at, n in enumerate(graph.nodes):
        for source in n.src:
            if source is not None and id(source.owner) in index:
                end_of[index[id(source.owner)]] = max(end_of[index[id(source.owner)]], at)
    end_of[index[id(output)]] = len(graph.nodes)
    spans = [
        (at, end_of[at], layout.offsets[at], layout.offsets[at] + graph.nodes[at].n_bytes) for at in layout.offsets
    ]
    for i, (born, dies, start, stop) in enumerate(spans):
        assert start % ALIGNMENT == 0 and stop <= layout.total_bytes
        for other_born, other_dies, other_start, other_stop in spans[i + 1 :]:
            if other_born <= dies and born <= other_dies:
                assert stop <= other_start or other_stop <= start


def test_memory_of_dead_values_is_used_again() -> None:
    graph = Graph()
    x = leaf(GGMLType.F32, (64,), "x")
    for _ in range(50):
        x = graph.add(node([x], 64))
    assert lay_out_scratch(graph, x, ALIGNMENT).total_bytes == 2 * 256


def test_effects_are_writes_into_leaves_and_what_they_need() -> None:
    graph = Graph()
    cache, x = leaf(GGMLType.F32, (8,), "cache"), leaf(GGMLType.F32, (8,), "x")
    kept = graph.add(node([x], 8))
    overwritten = graph.add(replace(node([kept], 8, Op.CPY), view_src=kept))
    written = graph.add(replace(node([view(kept), cache], 8, Op.SET_ROWS), view_src=cache))
    read = graph.add(view(written))
    dropped = graph.add(node([read, kept], 8))
    graph.add(replace(node([dropped, dropped], 8, Op.CPY), view_src=dropped))
    kept_view = written.src[0]
    assert kept_view is not None
    graph.nodes.insert(2, kept_view)
    assert graph.effects().nodes == [kept, overwritten, kept_view, written]
    assert Graph([kept, overwritten]).effects().nodes == []


def test_a_program_places_leaves_views_and_results() -> None:
    graph = Graph()
    x, unused = leaf(GGMLType.F32, (8,), "x"), leaf(GGMLType.F32, (8,), "unused")
    total = graph.add(node([x, x], 8))
    half = Tensor(GGMLType.F32, (4, 1, 1, 1), total.nb, Op.VIEW, src=(total,), view_src=total, view_offs=16)
    graph.add(half)
    output = graph.add(node([half, half], 4))
    inputs, scratch = Buffer("D", 256), Buffer("D", 256)
    layout = lay_out_scratch(graph, output, ALIGNMENT)
    places = [(x, Place(inputs, 64)), (unused, Place(inputs, 128))]
    program = make_program("p", graph, output, places, scratch, layout)
    assert [t.name for t in program.tensors if t.op is Op.NONE] == ["x"]
    by_op = {t.op: t for t in program.tensors if t.op is not Op.ADD}
    assert (by_op[Op.NONE].buffer, by_op[Op.NONE].offset) == (inputs, 64)
    first = program.tensors[program.nodes[0]]
    assert by_op[Op.VIEW].offset == first.offset + 16 and by_op[Op.VIEW].view_src == program.nodes[0]
    assert not by_op[Op.VIEW].is_computed and first.is_computed and first.flags & TensorFlag.COMPUTE
    assert by_op[Op.NONE].use_count == 2 and program.tensors[program.nodes[-1]].use_count == 0


def test_a_leaf_without_a_place_is_an_internal_error() -> None:
    graph = Graph()
    output = graph.add(node([leaf(GGMLType.F32, (8,), "lost")], 8))
    with pytest.raises(InternalError, match="lost"):
        make_program("p", graph, output, [], Buffer("D", 64), lay_out_scratch(graph, output, ALIGNMENT))


def test_a_node_that_outgrows_its_layout_is_an_internal_error() -> None:
    def build(n: int) -> tuple[Graph, Tensor, Tensor]:
        graph = Graph()
        x = leaf(GGMLType.F32, (n,), "x")
        return graph, x, graph.add(node([x], n))

    small, _, output = build(8)
    layout = lay_out_scratch(small, output, ALIGNMENT)
    large, x, output = build(64)
    with pytest.raises(InternalError, match="256 bytes, 32 were laid out"):
        make_program("p", large, output, [(x, Place(Buffer("D", 256), 0))], Buffer("D", 256), layout)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 500), max_size=30), st.sampled_from([256, 512, 4096]))
def test_packing_keeps_things_apart_and_buffers_small(sizes: list[int], max_bytes: int) -> None:
    packing = pack(sizes, ALIGNMENT, max_bytes)
    used: dict[int, int] = {}
    for size, (number, offset) in zip(sizes, packing.places, strict=True):
        assert offset >= used.get(number, 0) and offset % ALIGNMENT == 0
        used[number] = offset + size
        assert used[number] <= packing.buffer_sizes[number]
    for number, size in enumerate(packing.buffer_sizes):
        n_inside = sum(1 for buffer, _ in packing.places if buffer == number)
        assert size <= max_bytes or n_inside == 1
