"""The Jinja environment in which templates of model files run: sandboxed, metered, and as model authors expect it.

Blocks are trimmed, loops can break and continue, `generation` blocks render their body. Templates are rewritten when
they are compiled so that loops, macros, concatenations, slices and literals charge the meter of their rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from jinja2 import ChainableUndefined, Undefined, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from app.engine.text.meter import TemplateLimit
from app.engine.text.template_filters import (
    bound_text,
    check_join,
    check_text_method,
    meter_of,
    metered_filters,
    operate,
)

_TICK, _BUILT, _CONCAT, _SLICE = "\0tick", "\0built", "\0concat", "\0slice"

#: Some templates build lists of their own; what they are given are copies, so no harm can come from it.
_ALLOWED_CHANGES = frozenset({"append", "pop"})

_CHARS_PER_STEP = 16
_MAX_REFUSAL_CHARS = 2000

#: What calls cost in the time that one turn of a loop takes.
_STEPS_PER_CALL = 6
_STEPS_PER_MACRO = 30

N = TypeVar("N", bound=nodes.Node)


class TemplateRefusal(Exception):
    """A template called `raise_exception`: it does not take these messages."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment for all templates. Render with a meter under METER_KEY among the variables."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationExtension],
            optimized=False,  # constants are folded at compile time, outside of any meter
            finalize=_finalize,
        )
        self.filters = {
            **metered_filters(),
            _TICK: _tick,
            _BUILT: _built,
            _CONCAT: _concat,
            _SLICE: _slice,
        }
        del self.globals["lipsum"]
        self.globals["namespace"] = QuietNamespace
        self.globals["raise_exception"] = _raise

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        Instrument().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _ALLOWED_CHANGES and isinstance(obj, list | dict):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        if isinstance(obj, list) and isinstance(found, Undefined):
            # Templates ask for the role of the first message; there may be no message.
            return ChainableUndefined(obj=obj, name=argument)
        return found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return operate(meter_of(context), operator, left, right, self.binop_table)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(__context)
        meter.charge(_STEPS_PER_CALL)
        if (method := bound_text(__obj, __self)) is not None:
            args = check_text_method(meter, *method, args)
        else:
            for value in (*args, *kwargs.values()):
                if isinstance(value, list | tuple | dict):
                    meter.walk(value)
        return meter.made(super().call(__context, __obj, *args, **kwargs))


class QuietNamespace(Namespace):
    """A namespace that does not print what it holds: that could be more than anyone wants to wait for."""

    def __repr__(self) -> str:
        return "<namespace>"


class GenerationExtension(Extension):
    """`{% generation %}` marks what a model wrote, for training. Here the body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Instrument(NodeTransformer):
    """Rewrites a template so that what the environment does not see is charged as well."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = self._inside(node)
        tick = _call(_TICK, nodes.Const(_cost(node.body)))
        node.body = [nodes.ExprStmt(tick), *node.body]
        if node.test is not None:
            node.test = nodes.And(tick, node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _call(_CONCAT, nodes.List(self._inside(node).nodes))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node, [pair.value for pair in node.items])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node = self._inside(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call(_SLICE, node.node, *bounds)

    def _with_tick(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        node = self._inside(node)
        node.body = [nodes.ExprStmt(_call(_TICK, nodes.Const(_STEPS_PER_MACRO + _cost(node.body)))), *node.body]
        return node

    def _literal(self, node: nodes.Expr, values: list[nodes.Expr]) -> nodes.Node:
        if all(isinstance(value, nodes.Const) for value in values):
            return node
        return _call(_BUILT, self._inside(node))

    def _inside(self, node: N) -> N:
        return self.generic_visit(node)  # type: ignore[return-value]


def _call(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None)


def _cost(body: list[nodes.Node]) -> int:
    """Steps for one turn through this body: one, and what its fixed texts come to."""
    n_chars = sum(len(data.data) for node in body for data in _data_of(node))
    return 1 + n_chars // _CHARS_PER_STEP


def _data_of(node: nodes.Node) -> list[nodes.TemplateData]:
    return [node] if isinstance(node, nodes.TemplateData) else list(node.find_all(nodes.TemplateData))


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return meter_of(context).text(value)


@pass_context
def _tick(context: Context, steps: int) -> bool:
    meter_of(context).charge(steps)
    return True


@pass_context
def _built(context: Context, value: Any) -> Any:
    return meter_of(context).walk(value)


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    return "".join(check_join(meter_of(context), "", parts))


@pass_context
def _slice(context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    return meter_of(context).made(value[start:stop:step])


def _raise(message: object = "") -> NoReturn:
    """Clients are shown these words: as many as make sense, and none that cannot be written."""
    words = str(message).encode("utf-8", "replace").decode()
    cut = f"{words[:_MAX_REFUSAL_CHARS]}..." if len(words) > _MAX_REFUSAL_CHARS else words
    raise TemplateRefusal(cut or "it gives no reason")


_WIDE_TIME = re.compile(r"%[^a-zA-Z%]*\d{3}")


def strftime_of(now: datetime) -> Callable[[str], str]:
    """`strftime_now` for a rendering at that moment."""

    def strftime_now(layout: str) -> str:
        if _WIDE_TIME.search(layout):
            raise TemplateLimit("it asks for a very wide date")
        return now.strftime(layout)

    return strftime_now
