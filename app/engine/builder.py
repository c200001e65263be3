"""Builds ggml graphs: one method per op, shapes and op parameters exactly as ggml computes them.

Every method adds one node and returns it. Operands that do not fit raise ValueError with both shapes: graphs are made
by model files, which checked their weights before, so it names a mistake in ours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from app.engine.ggml import (
    TRAITS,
    GGMLType,
    GluOp,
    Op,
    Precision,
    RopeMode,
    Shape,
    SortOrder,
    TensorFlag,
    UnaryOp,
    contiguous_strides,
    is_contiguous,
)
from app.engine.graph import Graph, Tensor, shape4
from app.engine.rope import RopeParams


def float_word(value: float) -> int:
    """The bits of a float32 as a signed 32-bit word."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _dims(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.ne)) + "]"


def _require(fits: bool, what: str, *tensors: Tensor) -> None:
    if not fits:
        raise ValueError(f"{what}: {' and '.join(f'{t.name or t.op.name} {t.type.name} {_dims(t)}' for t in tensors)}")


def _repeats_into(small: Tensor, large: Tensor) -> bool:
    return all(n > 0 and m % n == 0 for n, m in zip(small.ne, large.ne, strict=True)) or 0 in large.ne


class GraphBuilder:
    """Adds nodes to a graph in call order, which is the order in which they take effect."""

    def __init__(self) -> None:
        self.graph = Graph()

    def label(self, tensor: Tensor, name: str) -> Tensor:
        """Name a node; for those who read graphs."""
        tensor.name = name
        return tensor

    def output(self, tensor: Tensor) -> Tensor:
        """Flag a node that is read from outside, so that no executor fuses it away."""
        tensor.flags |= TensorFlag.OUTPUT
        return tensor

    def _node(
        self,
        op: Op,
        type_: GGMLType,
        dims: Sequence[int],
        src: tuple[Tensor | None, ...],
        params: tuple[int, ...] = (),
    ) -> Tensor:
        ne = shape4(dims)
        words = tuple(map(int, params))
        return self.graph.add(Tensor(type_, ne, contiguous_strides(type_, ne), op, words, src))

    def _alias(
        self,
        op: Op,
        of: Tensor,
        src: tuple[Tensor | None, ...],
        params: tuple[int, ...] = (),
        ne: Shape | None = None,
        nb: Shape | None = None,
        offset: int = 0,
    ) -> Tensor:
        """A node that lies in the memory of `of`, `offset` bytes behind its start."""
        node = Tensor(of.type, ne or of.ne, nb or of.nb, op, params, src, of.owner, of.view_offs + offset)
        return self.graph.add(node)

    # Other names for the same memory.

    def reshape(self, a: Tensor, *dims: int) -> Tensor:
        ne = shape4(dims)
        _require(is_contiguous(a.type, a.ne, a.nb), "only a contiguous tensor can be reshaped", a)
        _require(ne[0] * ne[1] * ne[2] * ne[3] == a.n_elements, f"cannot be reshaped to {list(dims)}", a)
        return self._alias(Op.RESHAPE, a, (a,), ne=ne, nb=contiguous_strides(a.type, ne))

    def view(self, a: Tensor, dims: Sequence[int], strides: Sequence[int] = (), offset: int = 0) -> Tensor:
        """A window: `strides` are the byte strides of dimensions 1 and up; those not given are packed."""
        ne = shape4(dims)
        _require(ne[0] % TRAITS[a.type].block_elements == 0, f"a view of {ne[0]} elements cuts a block", a)
        nb = [TRAITS[a.type].block_bytes, contiguous_strides(a.type, ne)[1]]
        nb[1:] = list(strides) or nb[1:]
        while len(nb) < 4:
            nb.append(nb[-1] * ne[len(nb) - 1])
        words = (_signed(offset & 0xFFFFFFFF), _signed(offset >> 32))
        node = self._alias(Op.VIEW, a, (a,), words, ne, (nb[0], nb[1], nb[2], nb[3]), offset)
        _require(node.view_offs + node.n_bytes <= node.owner.n_bytes, "the view is larger than what it is on", node, a)
        return node

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Dimension i of `a` becomes dimension axes[i]."""
        _require(sorted(axes) == [0, 1, 2, 3], f"{axes} is not an order of four dimensions", a)
        back = [axes.index(i) for i in range(4)]
        ne = (a.ne[back[0]], a.ne[back[1]], a.ne[back[2]], a.ne[back[3]])
        nb = (a.nb[back[0]], a.nb[back[1]], a.nb[back[2]], a.nb[back[3]])
        return self._alias(Op.PERMUTE, a, (a,), tuple(axes), ne, nb)

    def transpose(self, a: Tensor) -> Tensor:
        ne, nb = a.ne, a.nb
        return self._alias(Op.TRANSPOSE, a, (a,), (), (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3]))

    # Copies.

    def cont(self, a: Tensor, *dims: int) -> Tensor:
        """A packed copy, in another shape of as many elements if one is given."""
        node = self._node(Op.CONT, a.type, dims or a.ne, (a,))
        _require(node.n_elements == a.n_elements, f"cannot be copied into the shape {list(dims)}", a)
        return node

    def cpy(self, a: Tensor, target: Tensor) -> Tensor:
        """Write `a` over `target`, element by element in logical order."""
        _require(a.n_elements == target.n_elements, "a copy needs as many elements as its target", a, target)
        return self._alias(Op.CPY, target, (a, target))

    def repeat(self, a: Tensor, *dims: int) -> Tensor:
        """Tile `a` to a shape that is a multiple of its own."""
        node = self._node(Op.REPEAT, a.type, dims, (a,))
        _require(_repeats_into(a, node), f"cannot be tiled to {list(dims)}", a)
        return node

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        same = all(m == n for i, (m, n) in enumerate(zip(a.ne, b.ne, strict=True)) if i != dim)
        _require(same and a.type == b.type, f"cannot be joined along dimension {dim}", a, b)
        ne = list(a.ne)
        ne[dim] += b.ne[dim]
        return self._node(Op.CONCAT, a.type, ne, (a, b), (dim,))

    def get_rows(self, a: Tensor, ids: Tensor) -> Tensor:
        fits = ids.type is GGMLType.I32 and a.ne[2:] == ids.ne[1:3] and ids.ne[3] == 1
        _require(fits, "rows cannot be picked by these ids", a, ids)
        type_ = GGMLType.I32 if a.type is GGMLType.I32 else GGMLType.F32
        return self._node(Op.GET_ROWS, type_, (a.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]), (a, ids))

    def set_rows(self, target: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Write rows of `rows` over rows `ids` of `target`; the result is `target` itself."""
        fits = (
            target.ne[0] == rows.ne[0]
            and target.ne[2:] == rows.ne[2:]
            and rows.ne[1] == ids.ne[0]
            and rows.ne[2] % ids.ne[1] == 0
            and rows.ne[3] % ids.ne[2] == 0
            and rows.type in (GGMLType.F32, GGMLType.F16)
            and ids.type in (GGMLType.I64, GGMLType.I32)
        )
        _require(fits, "rows cannot be stored like this", target, rows, ids)
        return self._alias(Op.SET_ROWS, target, (rows, ids, target))

    # Element by element.

    def _binary(self, op: Op, a: Tensor, b: Tensor) -> Tensor:
        _require(_repeats_into(b, a), f"{op.name} cannot tile its second operand over its first", a, b)
        return self._node(op, a.type, a.ne, (a, b))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary(Op.ADD, a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary(Op.SUB, a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary(Op.MUL, a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return self._binary(Op.DIV, a, b)

    def add_id(self, a: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """a[:, j, t] + rows[:, ids[j, t]]."""
        fits = a.ne[0] == rows.ne[0] and a.ne[1:3] == ids.ne[:2] and ids.type is GGMLType.I32
        _require(fits, "rows cannot be added by these ids", a, rows, ids)
        return self._node(Op.ADD_ID, a.type, a.ne, (a, rows, ids))

    def scale(self, a: Tensor, factor: float, bias: float = 0.0) -> Tensor:
        return self._node(Op.SCALE, a.type, a.ne, (a,), (float_word(factor), float_word(bias)))

    def clamp(self, a: Tensor, low: float, high: float) -> Tensor:
        return self._node(Op.CLAMP, a.type, a.ne, (a,), (float_word(low), float_word(high)))

    def unary(self, op: UnaryOp, a: Tensor) -> Tensor:
        _require(_packed_rows(a), f"{op.name} needs packed rows", a)
        return self._node(Op.UNARY, a.type, a.ne, (a,), (op,))

    def glu(self, op: GluOp, a: Tensor, b: Tensor | None = None, *, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
        """act(a) * b; with one operand a is the first half of its rows and b the second."""
        _require(b is None or (b.ne == a.ne and b.type == a.type), f"{op.name} needs equal operands", a, b or a)
        _require(b is not None or a.ne[0] % 2 == 0, f"{op.name} cannot halve its rows", a)
        dims = a.ne if b is not None else (a.ne[0] // 2, *a.ne[1:])
        return self._node(Op.GLU, a.type, dims, (a, b), (op, 0, float_word(alpha), float_word(limit)))

    # Along rows.

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        return self._norm(Op.RMS_NORM, a, eps)

    def norm(self, a: Tensor, eps: float) -> Tensor:
        return self._norm(Op.NORM, a, eps)

    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        return self._norm(Op.L2_NORM, a, eps)

    def _norm(self, op: Op, a: Tensor, eps: float) -> Tensor:
        _require(_packed_rows(a) and a.type is GGMLType.F32, f"{op.name} needs packed F32 rows", a)
        return self._node(op, a.type, a.ne, (a,), (float_word(eps),))

    def sum_rows(self, a: Tensor) -> Tensor:
        return self._node(Op.SUM_ROWS, a.type, (1, *a.ne[1:]), (a,))

    def argsort(self, a: Tensor, order: SortOrder = SortOrder.DESC) -> Tensor:
        return self._node(Op.ARGSORT, GGMLType.I32, a.ne, (a,), (order,))

    def soft_max(
        self,
        a: Tensor,
        mask: Tensor | None = None,
        *,
        scale: float = 1.0,
        max_bias: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if mask is not None:
            fits = mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1]
            fits = fits and a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0
            _require(fits, "the mask does not fit the scores", a, mask)
        params = (float_word(scale), float_word(max_bias))
        return self._node(Op.SOFT_MAX, a.type, a.ne, (a, mask, sinks), params)

    def rope(self, a: Tensor, positions: Tensor, rope: RopeParams, factors: Tensor | None = None) -> Tensor:
        """Rotate the heads of a [head, heads, tokens] tensor."""
        streams = 4 if rope.mode in (RopeMode.MROPE, RopeMode.VISION, RopeMode.IMROPE) else 1
        fits = positions.type is GGMLType.I32 and positions.ne[0] == streams * a.ne[2]
        _require(fits, f"{rope.mode.name} needs {streams} positions per token", a, positions)
        _require(rope.n_dims <= a.ne[0], f"cannot rotate {rope.n_dims} dimensions", a)
        if factors is not None:
            _require(factors.ne[0] >= rope.n_dims // 2, "too few frequency factors", a, factors)
        floats = (
            rope.freq_base,
            rope.freq_scale,
            rope.ext_factor,
            rope.attn_factor,
            rope.beta_fast,
            rope.beta_slow,
        )
        params = (0, rope.n_dims, rope.mode, 0, rope.n_ctx_orig, *map(float_word, floats), *rope.sections)
        return self._node(Op.ROPE, a.type, a.ne, (a, positions, factors), params)

    # Products.

    def mul_mat(self, a: Tensor, b: Tensor, precision: Precision = Precision.DEFAULT) -> Tensor:
        """[k, n] times [k, m] to [n, m]: a weight [in, out] maps [in, tokens] to [out, tokens]."""
        _require(_multiplies(a, b), "these cannot be multiplied", a, b)
        return self._node(Op.MUL_MAT, GGMLType.F32, (a.ne[1], *b.ne[1:]), (a, b), (precision,))

    def mul_mat_id(self, experts: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """[k, n, experts] times [k, 1 or u, tokens] by ids [u, tokens] to [n, u, tokens]."""
        fits = (
            experts.ne[0] == b.ne[0]
            and experts.ne[3] == b.ne[3] == 1
            and ids.ne[1] == b.ne[2]
            and ids.ne[0] % b.ne[1] == 0
            and ids.type is GGMLType.I32
        )
        _require(fits, "experts cannot be multiplied like this", experts, b, ids)
        dims = (experts.ne[1], ids.ne[0], b.ne[2])
        return self._node(Op.MUL_MAT_ID, GGMLType.F32, dims, (experts, b, ids), (Precision.DEFAULT,))

    def flash_attn_ext(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        max_bias: float = 0.0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [dk, tokens, heads], k [dk, cells, kv heads], v [dv, cells, kv heads], mask F16 [cells, tokens].

        The result is [dv, heads, tokens].
        """
        _require(_multiplies(k, q) and k.ne[1:] == v.ne[1:], "attention does not fit", q, k, v)
        if mask is not None:
            fits = mask.type is GGMLType.F16 and mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1]
            _require(fits, "the mask does not fit the attention", q, k, mask)
        params = (float_word(scale), float_word(max_bias), float_word(softcap), Precision.F32)
        dims = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
        return self._node(Op.FLASH_ATTN_EXT, GGMLType.F32, dims, (q, k, v, mask, sinks), params)

    # Recurrent layers.

    def ssm_conv(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Causal convolution: [k - 1 + tokens, channels, seqs] with [k, channels] to [channels, tokens, seqs]."""
        _require(weight.ne[1] == inputs.ne[1] and weight.ne[0] <= inputs.ne[0], "cannot convolve", inputs, weight)
        n_tokens = inputs.ne[0] - weight.ne[0] + 1
        return self._node(Op.SSM_CONV, GGMLType.F32, (inputs.ne[1], n_tokens, inputs.ne[2]), (inputs, weight))

    def gated_delta_net(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        """q, k [n, key heads, tokens, seqs], v [n, heads, tokens, seqs], g, beta [1, heads, tokens, seqs].

        `state` is [n, n, heads, seqs], keys fastest. The result packs [n * heads, tokens * seqs] outputs and, behind
        them, the new state of every sequence.
        """
        n, heads, n_tokens, n_seqs = v.ne
        fits = (
            q.ne == k.ne
            and (q.ne[0], *q.ne[2:]) == (n, n_tokens, n_seqs)
            and heads % q.ne[1] == 0
            and g.ne[1:] == v.ne[1:]
            and beta.ne == (1, *v.ne[1:])
            and state.ne == (n, n, heads, n_seqs)
        )
        _require(fits, "the delta net does not fit", q, v, g, beta, state)
        dims = (n * heads, n_tokens * n_seqs + n * n_seqs)
        return self._node(Op.GATED_DELTA_NET, GGMLType.F32, dims, (q, k, v, g, beta, state), (1,))


def _signed(word: int) -> int:
    return word - (1 << 32) if word & 0x80000000 else word


def _packed_rows(a: Tensor) -> bool:
    return a.ne[0] == TRAITS[a.type].block_elements or a.nb[0] == TRAITS[a.type].block_bytes


def _multiplies(a: Tensor, b: Tensor) -> bool:
    return (
        a.ne[0] == b.ne[0]
        and b.ne[2] % max(a.ne[2], 1) == 0
        and b.ne[3] % max(a.ne[3], 1) == 0
        and a.nb[0] == TRAITS[a.type].block_bytes
    )
