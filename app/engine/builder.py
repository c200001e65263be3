"""Builds ggml graphs: one method per op, shapes and op parameters exactly as ggml computes them."""

from __future__ import annotations

from app.engine.graph import Graph


class GraphBuilder:
    """Adds nodes to a graph in call order, which is the order in which they take effect."""

    def __init__(self) -> None:
        self.graph = Graph()
