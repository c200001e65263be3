"""Ops that work element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from app.engine.devices.reference.node import Binder, Node, Step
from app.engine.devices.reference.operand import Floats, View
from app.engine.ggml import Op

#: A numpy function of one or two arrays that can write where it is told.
Ufunc = Callable[..., Any]


def tile_view(array: View, tile: tuple[int, ...]) -> View:
    """An array [a, b, ...] seen as [a / ta, ta, b / tb, tb, ...] for a tile [ta, tb, ...]."""
    shape = [n for whole, t in zip(array.shape, tile, strict=True) for n in (whole // t, t)]
    strides = [s for stride, t in zip(array.strides, tile, strict=True) for s in (stride * t, stride)]
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def broadcast_views(large: View, small: View) -> tuple[Callable[[View], View], View]:
    """How to see arrays so that numpy's broadcasting repeats `small` into `large` as ggml does: index modulo extent.

    Returns the function that reshapes arrays of the large shape, and the small one to go with them.
    """
    if all(n in (1, whole) for n, whole in zip(small.shape, large.shape, strict=True)):
        return lambda array: array, small
    folded = small.reshape([n for extent in small.shape for n in (1, extent)])
    return lambda array: tile_view(array, small.shape), folded


def _binary(ufunc: Ufunc) -> Binder:
    def bind(n: Node) -> Step:
        a, b, out = n.src(0), n.src(1), n.out
        if a.is_f32 and b.is_f32 and out.is_f32:
            see, small = broadcast_views(a.array, b.array)
            large, result = see(a.array), see(out.array)
            return lambda: ufunc(large, small, out=result)

        def step() -> None:
            x = np.ascontiguousarray(a.load())
            see, small = broadcast_views(x, b.load())
            out.store(ufunc(see(x), small).reshape(x.shape))

        return step

    return bind


def _map(function: Callable[[Node], Ufunc]) -> Binder:
    """An op of one float32 source; `function(node)` is called with the source and `out=` the result."""

    def bind(n: Node) -> Step:
        x, out, compute = n.src(0).array, n.out.array, function(n)
        return lambda: compute(x, out=out)

    return bind


def _scale(n: Node) -> Ufunc:
    """s * x + b."""
    factor, bias = np.float32(n.param_f32(0)), np.float32(n.param_f32(1))
    if bias == 0:
        return lambda x, out: np.multiply(x, factor, out=out)
    return lambda x, out: np.add(np.multiply(x, factor, out=out), bias, out=out)


def _clamp(n: Node) -> Ufunc:
    low, high = np.float32(n.param_f32(0)), np.float32(n.param_f32(1))
    return lambda x, out: np.clip(x, low, high, out=out)


def _leaky_relu(n: Node) -> Ufunc:
    slope = np.float32(n.param_f32(0))
    return lambda x, out: np.copyto(out, np.where(x > 0, x, x * slope))


def _fill(n: Node) -> Step:
    value = np.float32(n.param_f32(0))
    return lambda: n.out.store(np.full(n.out.array.shape, value, np.float32))


def _add1(n: Node) -> Step:
    a, one, out = n.src(0).array, n.src(1).array.reshape(()), n.out.array
    return lambda: np.add(a, one, out=out)


def _window(accumulate: bool) -> Binder:
    """ACC and SET: a copy of s0 whose window (strides and offset are parameters) is added to, or replaced by, s1."""

    def bind(n: Node) -> Step:
        a, b, out = n.src(0).array, n.src(1).array, n.out
        if b.size == 0:
            return lambda: np.copyto(out.array, a)
        strides = (n.param(2), n.param(1), n.param(0), 4)
        start = out.tensor.offset + n.param(3)
        target: Floats = np.ndarray(b.shape, np.float32, out.memory, start, strides)

        def step() -> None:
            np.copyto(out.array, a)
            if accumulate:
                np.add(target, b, out=target)
            else:
                np.copyto(target, b)

        return step

    return bind


BINDERS: dict[Op, Binder] = {
    Op.ADD: _binary(np.add),
    Op.SUB: _binary(np.subtract),
    Op.MUL: _binary(np.multiply),
    Op.DIV: _binary(np.divide),
    Op.ADD1: _add1,
    Op.ACC: _window(accumulate=True),
    Op.SET: _window(accumulate=False),
    Op.SCALE: _map(_scale),
    Op.CLAMP: _map(_clamp),
    Op.LEAKY_RELU: _map(_leaky_relu),
    Op.FILL: _fill,
    Op.SQR: _map(lambda n: np.square),
    Op.SQRT: _map(lambda n: np.sqrt),
    Op.LOG: _map(lambda n: np.log),
    Op.SIN: _map(lambda n: np.sin),
    Op.COS: _map(lambda n: np.cos),
}
