"""OperationGraph: the description of a computation, tensor by tensor and operation by operation.

    graph = OperationGraph()
    q, k, v = (graph.tensor(uid=n, dims=(2, 8, 128, 64), dtype="float16") for n in (1, 2, 3))
    scores = graph.matmul(q, graph.transpose(k)) * 0.125
    graph.output(graph.matmul(graph.softmax(scores), v), uid=4, dtype="float16")

A graph holds no data and may be executed any number of times, by any context.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, get_args

from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.attention.key_mask import Alignment
from gpu_actors.attention.mha import Mask
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import expect, flag, integer, one_of, real
from gpu_actors.graph.ops import Node, infer
from gpu_actors.graph.tensor import (
    FLOATS,
    INT32_MAX,
    SCALAR_DTYPES,
    GraphTensor,
    Operand,
    checked_layout,
    checked_scalar,
    checked_uids,
)
from gpu_actors.graph.validate import Order, validate

__all__ = ["OperationGraph"]


class OperationGraph:
    """Tensors, and operations on them.

    Its methods add nodes and return the tensors that these write. They raise `InvalidRequest` or `Unsupported` with the
    name of the node or the tensor for operands that do not fit together. `validate` checks the whole graph. Use a graph
    on one thread at a time, and do not change it between its submission and the reply.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, GraphTensor] = {}
        self.nodes: list[Node] = []
        self._last_own_uid = 0
        self._removed = 0  # removed nodes, whose numbers are not reused
        self._order: Order | None = None
        self._signature: str | None = None

    # Tensors

    def tensor(
        self,
        *,
        uid: int,
        dims: Sequence[int],
        dtype: str,
        strides: Sequence[int] | None = None,
        virtual: bool = False,
        name: str = "",
    ) -> GraphTensor:
        """A tensor that `execute` gets under ``uid``, or a virtual one that a `node` writes.

        uid: an int >= 0, unique in the graph.
        dims: 1 to 4 extents.
        dtype: float16, bfloat16, float32, float64, int32 or bool.
        strides: in elements, of any sign. By default without gaps.
        """
        extents, steps, checked = checked_layout(self._new_uid(uid), dims, strides, dtype)
        return self._add_tensor(GraphTensor(self, uid, extents, checked, steps, virtual=virtual, name=name))

    def scalar(self, *, uid: int, dtype: str = "float32", value: float | None = None, name: str = "") -> GraphTensor:
        """A number that is passed by value: in this call, or with every `execute` under ``uid``.

        A value from this call is part of the signature, a value of `execute` is not. Neither is compiled into a kernel.
        dtype: float32 (for values that fit), float64, int32, or uint64 for the seed of a dropout.
        """
        return self._add_scalar(self._new_uid(uid), dtype, value, name)

    def constant(self, value: float) -> GraphTensor:
        """A scalar of known value without a uid, such as a number in arithmetic. An int is int32."""
        integral = isinstance(value, int) and not isinstance(value, bool)
        dtype = "int32" if integral and abs(value) <= INT32_MAX else "float32"
        self._last_own_uid -= 1
        return self._add_scalar(self._last_own_uid, dtype, value, "")

    def output(
        self,
        tensor: GraphTensor,
        *,
        uid: int,
        dtype: str | None = None,
        strides: Sequence[int] | None = None,
        name: str = "",
    ) -> GraphTensor:
        """Make a tensor a result of `execute`, under ``uid``.

        dtype: by default the dtype in which it is computed. strides: by default without gaps.
        """
        self._check_own("output", tensor)
        expect(isinstance(name, str), "name", name, "must be a str")
        field = f"tensor {uid}"
        expect(tensor.virtual, field, repr(tensor), "must be virtual: it is an input or an output already")
        _, steps, checked = checked_layout(
            self._new_uid(uid), tensor.dims, strides, tensor.dtype if dtype is None else dtype
        )
        both = tensor.is_float and checked in FLOATS
        expect(both or checked == tensor.dtype, field, checked, f"{tensor.dtype} cannot be given as another kind")
        old = tensor.uid
        del self.tensors[old]
        self.nodes = [_renamed(node, old, uid) for node in self.nodes]
        tensor.uid, tensor.dtype, tensor.strides = uid, checked, steps
        tensor.virtual, tensor.name = False, name or tensor.name
        return self._add_tensor(tensor)

    # Operations

    def matmul(self, a: GraphTensor, b: GraphTensor) -> GraphTensor:
        """(.., M, K) times (.., K, N). If ``b`` has fewer heads (dim 1 of 4), heads of ``a`` share them: GQA."""
        return self._add("matmul", (a, b))

    def transpose(self, a: GraphTensor) -> GraphTensor:
        """The last two dims exchanged."""
        return self._add("transpose", (a,))

    def add(self, a: Operand, b: Operand) -> GraphTensor:
        """a + b. As in every operation of two operands, they broadcast against each other."""
        return self._add("add", (a, b))

    def sub(self, a: Operand, b: Operand) -> GraphTensor:
        """a - b."""
        return self._add("sub", (a, b))

    def mul(self, a: Operand, b: Operand) -> GraphTensor:
        """a b, element by element."""
        return self._add("mul", (a, b))

    def div(self, a: Operand, b: Operand) -> GraphTensor:
        """The quotient, which is a float for integers too."""
        return self._add("div", (a, b))

    def floordiv(self, a: Operand, b: Operand) -> GraphTensor:
        """The quotient rounded down, as Python's."""
        return self._add("floordiv", (a, b))

    def mod(self, a: Operand, b: Operand) -> GraphTensor:
        """The remainder with the sign of the divisor, as Python's."""
        return self._add("mod", (a, b))

    def max(self, a: Operand, b: Operand) -> GraphTensor:
        """The larger of two. The gradient of equal ones goes to ``a``."""
        return self._add("max", (a, b))

    def min(self, a: Operand, b: Operand) -> GraphTensor:
        """The smaller of two. The gradient of equal ones goes to ``a``."""
        return self._add("min", (a, b))

    def neg(self, a: Operand) -> GraphTensor:
        """-a."""
        return self._add("neg", (a,))

    def abs(self, a: Operand) -> GraphTensor:
        """The magnitude. Its gradient at 0 is 0."""
        return self._add("abs", (a,))

    def exp(self, a: Operand) -> GraphTensor:
        """e to the power of a."""
        return self._add("exp", (a,))

    def log(self, a: Operand) -> GraphTensor:
        """The natural logarithm."""
        return self._add("log", (a,))

    def sqrt(self, a: Operand) -> GraphTensor:
        """The square root."""
        return self._add("sqrt", (a,))

    def sin(self, a: Operand) -> GraphTensor:
        """The sine of radians. Its float32 error is at most 4e-7 for |a| below 2^24; larger floats are all integers."""
        return self._add("sin", (a,))

    def cos(self, a: Operand) -> GraphTensor:
        """The cosine of radians, with the error of `sin`."""
        return self._add("cos", (a,))

    def tan(self, a: Operand) -> GraphTensor:
        """The tangent of radians, sin(a) / cos(a)."""
        return self._add("tan", (a,))

    def tanh(self, a: Operand) -> GraphTensor:
        """The hyperbolic tangent, as in softcaps."""
        return self._add("tanh", (a,))

    def sigmoid(self, a: Operand) -> GraphTensor:
        """1 / (1 + exp(-a))."""
        return self._add("sigmoid", (a,))

    def gelu(self, a: Operand) -> GraphTensor:
        """a Phi(a), with the exact distribution function (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
        return self._add("gelu", (a,))

    def floor(self, a: Operand) -> GraphTensor:
        """The largest integer that is not above a. Its gradient is 0."""
        return self._add("floor", (a,))

    def gt(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: a > b."""
        return self._add("gt", (a, b))

    def ge(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: a >= b."""
        return self._add("ge", (a, b))

    def lt(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: a < b."""
        return self._add("lt", (a, b))

    def le(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: a <= b."""
        return self._add("le", (a, b))

    def eq(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: a equals b."""
        return self._add("eq", (a, b))

    def ne(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: a differs from b."""
        return self._add("ne", (a, b))

    def logical_and(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: both hold."""
        return self._add("logical_and", (a, b))

    def logical_or(self, a: Operand, b: Operand) -> GraphTensor:
        """bool: one holds, or both."""
        return self._add("logical_or", (a, b))

    def logical_not(self, a: Operand) -> GraphTensor:
        """bool: a does not hold."""
        return self._add("logical_not", (a,))

    def select(self, condition: Operand, a: Operand, b: Operand) -> GraphTensor:
        """``a`` where the condition holds, else ``b``."""
        return self._add("select", (condition, a, b))

    def index(self, like: GraphTensor, axis: int) -> GraphTensor:
        """int32: the index along an axis of ``like``, with dim 1 along the others."""
        return self._add("index", (like,), axis=axis)

    def mask(self, scores: GraphTensor, mask: Mask, alignment: Alignment = "top_left") -> GraphTensor:
        """The scores, with -inf for keys that a row does not see. If the softmax reads them, kernels skip whole tiles.

        alignment: "top_left" aligns row 0 with key 0, "bottom_right" the last row with the last key.
        """
        expect(isinstance(mask, Mask), "mask", mask, "must be a Mask, as Mask.causal()")
        one_of("alignment", alignment, get_args(Alignment))
        if mask.kind == "none":
            return scores
        return self._add("mask", (scores,), kind=mask.kind, width=mask.width, alignment=alignment)

    def mask_mod(self, scores: GraphTensor, visible: Callable[..., GraphTensor]) -> GraphTensor:
        """The scores, with -inf wherever ``visible(b, h, q_idx, kv_idx)`` is false.

        visible: takes the int32 indices along the four axes of ``scores`` and returns a bool tensor of the graph.
        Raises InvalidRequest if it returns anything else, and for scores that do not have four dims.
        """
        expect(callable(visible), "mask_mod", visible, "must be a function of (b, h, q_idx, kv_idx)")
        expect(len(scores.dims) == 4, "mask_mod", scores.dims, "masks scores of four dims, (batch, heads, rows, keys)")
        indices = [self.index(scores, axis) for axis in range(4)]
        condition = visible(*indices)
        is_bool = isinstance(condition, GraphTensor) and condition.dtype == "bool"
        expect(is_bool, "mask_mod", condition, "must return a bool tensor of the graph, as comparisons do")
        hidden = self._add("select", (condition, scores, -math.inf), mask_mod=True)
        read = {uid for node in self.nodes for uid in node.inputs}
        unread = {index.uid for index in indices} - read  # `validate` refuses unread tensors
        self.nodes = [node for node in self.nodes if unread.isdisjoint(node.outputs)]
        self._removed += len(unread)
        for uid in unread:
            del self.tensors[uid]
        return hidden

    def block_mask(
        self,
        scores: GraphTensor,
        kv_num_blocks: GraphTensor,
        kv_indices: GraphTensor,
        full_kv_num_blocks: GraphTensor | None = None,
        full_kv_indices: GraphTensor | None = None,
        q_num_blocks: GraphTensor | None = None,
        q_indices: GraphTensor | None = None,
        full_q_num_blocks: GraphTensor | None = None,
        full_q_indices: GraphTensor | None = None,
        *,
        block_size: tuple[int, int] = (128, 128),
    ) -> GraphTensor:
        """The scores, with -inf outside of listed blocks of keys. The lists are those of torch's ``BlockMask``.

        If the softmax, or a `mask` before it, reads the result, kernels neither load nor multiply unlisted blocks. The
        lists hide no key inside of a block; a `mask_mod` before them does that. It must show every key of full blocks,
        where kernels may skip it.

        block_size: rows and keys of a block. Below, R = ceil(rows / block_size[0]) and C = ceil(keys / block_size[1]).
        kv_num_blocks: int32 (1 or batch, 1 or heads, R), how many entries of kv_indices, int32 (.., R, C), count.
        full_kv_*: the same for full blocks. Each block is listed once.
        q_*, full_q_*: the transposed lists, (.., C) and (.., C, R), over which kernels of gradients iterate.
            Deterministic gradients read both kinds. If these have different blocks the launch never ends, so lists on
            the host are checked for them. Otherwise indices are not checked.
        Raises InvalidRequest for a list without its counts, and for another dtype or shape.
        """
        pairs = (
            ("kv_indices", kv_num_blocks, kv_indices),
            ("full_kv_indices", full_kv_num_blocks, full_kv_indices),
            ("q_indices", q_num_blocks, q_indices),
            ("full_q_indices", full_q_num_blocks, full_q_indices),
        )
        for name, counts, indices in pairs:
            expect((counts is None) == (indices is None), name, indices, "must come with its counts, and they with it")
        transposed = q_num_blocks is not None
        fits = not transposed or (full_q_indices is None) == (full_kv_indices is None)
        expect(fits, "full_q_indices", full_q_indices, "must be given where full_kv_indices and q_indices are")
        expect(transposed or full_q_indices is None, "full_q_indices", full_q_indices, "must come beside q_indices")
        lists = [tensor for _, counts, indices in pairs for tensor in (counts, indices) if tensor is not None]
        return self._add("block_mask", (scores, *lists), block_size=_tuple(block_size), transposed=transposed)

    def reduction(self, a: GraphTensor, kind: str, axes: int | Sequence[int] = -1) -> GraphTensor:
        """The "sum", "mean", "max" or "min" over axes. Their dims become 1."""
        axis_list = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        return self._add("reduction", (a,), kind=kind, axes=axis_list)

    def softmax(self, scores: GraphTensor) -> GraphTensor:
        """The softmax over the last axis. It is 0 in a row in which every score is -inf."""
        return self._add("softmax", (scores,))

    def softmax_with_stats(self, scores: GraphTensor) -> tuple[GraphTensor, GraphTensor]:
        """`softmax`, and each row's natural log-sum-exp, with dim 1 in the last axis: -inf if every score is -inf."""
        weights, stats = self._add_many("softmax", (scores,), 2)
        return weights, stats

    def softmax_with_rows(self, scores: GraphTensor, *rows: str) -> tuple[GraphTensor, ...]:
        """`softmax`, and the statistics of each row that ``rows`` names, in that order, with dim 1 in the last axis.

        rows: each at most once, "stats" (the natural log-sum-exp), "score_max" (the largest score) and "score_sum_exp"
            (the sum of exp(score - score_max)). So stats = score_max + log(score_sum_exp).
        Scores means the softmax's input, before any dropout. If every score is -inf the statistics are -inf, -inf and
        0. A score of NaN or +inf makes all three NaN. Raises InvalidRequest for another name or a repeated one.
        """
        plain = not rows or (len(rows) == 1 and isinstance(rows[0], str) and rows[0] == "stats")
        attributes: dict[str, Any] = {} if plain else {"rows": rows}
        return self._add_many("softmax", (scores,), 1 + len(rows), **attributes)

    def dropout(self, weights: GraphTensor, probability: float, seed: int | GraphTensor = 0) -> GraphTensor:
        """Philox4x32-10 dropout of (batch, heads, rows, keys), as in `FlashForward`. Kept weights are scaled up.

        seed: an int, or a scalar of uint64. It decides only the random numbers, so it is not part of the signature.
        """
        p = real("dropout_p", probability, "a number in [0, 1)")
        expect(0 <= p < 1, "dropout_p", probability, "must be a number in [0, 1)")
        if isinstance(seed, GraphTensor):
            return self._add("dropout", (weights, seed), probability=p)
        number = integer("dropout_seed", seed, 0, (1 << 64) - 1)
        return self._add("dropout", (weights,), seed=number, probability=p)

    def gradient(
        self,
        output: GraphTensor,
        doutput: GraphTensor,
        wrt: Sequence[GraphTensor],
        forward: tuple[GraphTensor, GraphTensor] | None = None,
        *,
        deterministic: bool = False,
    ) -> tuple[GraphTensor, ...]:
        """The gradients of sum(output * doutput) with respect to the graph's inputs ``wrt``, in their order.

        forward: the forward pass's results for ``output`` and for the stats of its softmax. Kernels read them instead
            of computing them again.
        deterministic: whether results are bit-identical every time.
        """
        results = () if forward is None else forward
        for name, tensors in (("wrt", wrt), ("forward", results)):
            expect(isinstance(tensors, tuple | list), "gradient", tensors, f"{name} must be a tuple of tensors")
            for tensor in tensors:
                self._check_own("gradient", tensor)
        uids, forward_uids = tuple(t.uid for t in wrt), tuple(t.uid for t in results)
        operands = (output, doutput, *wrt, *results)
        options: dict[str, Any] = {"wrt": uids, "forward": forward_uids}
        if flag("deterministic", deterministic):
            options["deterministic"] = True
        return self._add_many("gradient", operands, len(wrt), **options)

    def node(
        self, op: str, inputs: Sequence[int], outputs: Sequence[int], *, name: str = "", **attributes: Any
    ) -> Node:
        """Add an operation on tensors by their uids, in any order, for programs that generate graphs.

        attributes: axis of an index; mask_mod of a select; rows of a softmax; kind, width and alignment of a mask; kind
        and axes of a reduction; probability and seed of a dropout; wrt and forward (uids) and deterministic of a
        gradient. `validate` checks the rest.
        """
        expect(isinstance(name, str), "name", name, "must be a str")
        expect(isinstance(op, str), "op", op, "must be the name of an operation")
        label = name or f"{op}_{len(self.nodes)}"
        seed = attributes.pop("seed", 0) if op == "dropout" else 0
        number = integer("dropout_seed", seed, 0, (1 << 64) - 1)
        converted = {key: _tuple(value) for key, value in attributes.items()}
        read, written = checked_uids(label, "inputs", inputs), checked_uids(label, "outputs", outputs)
        node = Node(label, op, read, written, _ordered(converted), number)
        self.nodes.append(node)
        self._changed()
        return node

    # The whole

    def validate(self) -> None:
        """Raise `InvalidRequest`, naming the node or tensor, unless the graph is sound.

        In a sound graph every tensor of a node exists and is written at most once, none depends on itself, dims and
        dtypes agree, and results of `execute` are not virtual. Raises `Unsupported` for the gradient of a gradient.
        """
        self.order()

    def order(self) -> Order:
        """The nodes of a sound graph in topological order."""
        if self._order is None:
            self._order = validate(self.tensors, self.nodes)
        return self._order

    def signature(self) -> str:
        """The hexadecimal SHA-256 of everything that changes a result or its code. It is the same in every process.

        Equal signatures share a plan. Raises as `validate`.
        """
        if self._signature is None:
            self._signature = hashlib.sha256(_described(self.tensors, self.order()).encode()).hexdigest()
        return self._signature

    # Inside

    def operate(self, op: str, operands: Sequence[Operand]) -> GraphTensor:
        """Add an operation without attributes, such as arithmetic on a tensor, and return its result.

        Raises InvalidRequest for an operation that does not exist and for operands that do not fit it.
        """
        expect(isinstance(op, str), "op", op, "must be the name of an operation")
        expect(isinstance(operands, tuple | list), op, operands, "operands must be a tuple or list")
        return self._add(op, operands)

    def _add(self, op: str, operands: Sequence[Operand], *, seed: int = 0, **attributes: Any) -> GraphTensor:
        return self._add_many(op, operands, 1, seed=seed, **attributes)[0]

    def _add_many(
        self, op: str, operands: Sequence[Operand], writes: int, *, seed: int = 0, **attributes: Any
    ) -> tuple[GraphTensor, ...]:
        name = f"{op}_{len(self.nodes) + self._removed}"
        read = tuple(self._operand(name, operand) for operand in operands)
        uids = tuple(range(self._last_own_uid - 1, self._last_own_uid - writes - 1, -1))
        self._last_own_uid -= writes
        node = Node(name, op, tuple(tensor.uid for tensor in read), uids, _ordered(attributes), seed)
        written = infer(node, read)
        self.nodes.append(node)
        return tuple(
            self._add_tensor(GraphTensor(self, uid, dims, dtype, contiguous_strides(dims, 1), virtual=True))
            for uid, (dims, dtype) in zip(uids, written, strict=True)
        )

    def _operand(self, node: str, operand: object) -> GraphTensor:
        if isinstance(operand, GraphTensor):
            self._check_own(node, operand)
            return operand
        if not isinstance(operand, bool) and isinstance(operand, Real):  # NumPy's, too
            return self.constant(int(operand) if isinstance(operand, Integral) else float(operand))
        raise InvalidRequest(node, operand, "operands are tensors of the graph, or numbers")

    def _check_own(self, node: str, tensor: object) -> None:
        own = isinstance(tensor, GraphTensor) and tensor.graph is self
        expect(own, node, tensor, "must be a tensor of this graph")

    def _add_scalar(self, uid: int, dtype: str, value: float | None, name: str) -> GraphTensor:
        field = f"tensor {uid}"
        one_of(field, dtype, SCALAR_DTYPES, f"scalars are {', '.join(SCALAR_DTYPES)}")
        if value is not None:
            value = checked_scalar(field, dtype, value)
        return self._add_tensor(GraphTensor(self, uid, (), dtype, (), by_value=True, value=value, name=name))

    def _add_tensor(self, tensor: GraphTensor) -> GraphTensor:
        self.tensors[tensor.uid] = tensor
        self._changed()
        return tensor

    def _changed(self) -> None:
        self._order = self._signature = None

    def _new_uid(self, uid: int) -> int:
        integer("uid", uid, 0)
        expect(uid not in self.tensors, "uid", uid, "must be unique in the graph")
        return uid


def _ordered(attributes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(attributes.items()))


def _tuple(value: Any) -> Any:
    """An attribute as a node stores it: lists become tuples. `infer` refuses an attribute of the wrong type."""
    return tuple(value) if isinstance(value, list) else value


def _described(tensors: Mapping[int, GraphTensor], order: Order) -> str:
    """A graph as text: tensors by uid, then nodes in the order of their computation.

    It is the same in every process. It omits names and seeds, which change neither the formula nor the code.
    """
    described = (_described_tensor(tensors[uid]) for uid in sorted(tensors))
    return "\n".join(("graph-1", *described, *map(_described_node, order.nodes)))


def _described_tensor(tensor: GraphTensor) -> str:
    # The stride of an extent of 1 is irrelevant.
    strides = tuple(step if extent > 1 else 0 for step, extent in zip(tensor.strides, tensor.dims, strict=True))
    role = "virtual" if tensor.virtual else "value" if tensor.by_value else "array"
    value = "passed" if tensor.value is None else f"{type(tensor.value).__name__} {tensor.value!r}"
    return f"{tensor.uid} {tensor.dtype} {tensor.dims} {strides} {role} {value}"


def _described_node(node: Node) -> str:
    return f"{node.op} {node.inputs} {node.outputs} {node.attributes!r}"


def _renamed(node: Node, old: int, new: int) -> Node:
    def swap(uids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new if uid == old else uid for uid in uids)

    if old not in node.inputs and old not in node.outputs:
        return node
    attributes = tuple((name, swap(value) if name in ("wrt", "forward") else value) for name, value in node.attributes)
    return Node(node.name, node.op, swap(node.inputs), swap(node.outputs), attributes, node.seed)
