"""Finds attention in a graph: which tensors are q, k and v, and the nodes between the product and the softmax.

    matmul(q, k^T) -> times a constant -> any pointwise nodes -> plus a bias -> mask -> softmax -> dropout -> matmul v

Everything except the two products and the softmax is optional. The pointwise nodes become the score modification that
is compiled into the kernel. A graph of another form is refused with the first node that does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from gpu_actors.attention.mha import Mask
from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.errors import Unsupported
from gpu_actors.graph.modification import Modification, ScoreInputs
from gpu_actors.graph.ops import POINTWISE, Node, row_stats
from gpu_actors.graph.tensor import GraphTensor
from gpu_actors.kernels.support import ELEMENTS

if TYPE_CHECKING:
    from gpu_actors.graph.graph import OperationGraph

__all__ = ["AttentionMatch", "Gradients", "View", "match_attention"]


class View(NamedTuple):
    """An input of the graph, and whether its last two dims are exchanged relative to the pattern's q, k or v."""

    uid: int
    transposed: bool


class Gradients(NamedTuple):
    """The uids that backward reads and writes.

    written: the requested gradients by "q", "k", "v" and "bias".
    """

    dout: int
    out: int
    stats: int
    written: dict[str, int]


@dataclass(frozen=True, slots=True)
class AttentionMatch:
    """Attention in a graph, by uids.

    problem: the attention problem.
    dropout: the index of the dropout among the nodes.
    rows: outputs of one number per row, by their names in the problem's launch: "lse", "score_max", "score_sum_exp".
    """

    problem: AttentionProblem
    q: View
    k: View
    v: View
    bias: int | None
    modification: Modification | None
    dropout: int | None
    out: int
    rows: dict[str, int]
    gradients: Gradients | None = None


def match_attention(graph: OperationGraph) -> AttentionMatch:
    return _Matcher(graph).match()


def refuse(node: Node, reason: str, nearest: str | None = None) -> NoReturn:
    raise Unsupported(node.name, node.op, reason, nearest)


class _Matcher:
    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._order = graph.order()
        self._used: set[str] = set()
        self._wrt: set[int] | None = None
        self._deterministic = False

    def match(self) -> AttentionMatch:
        gradient = next((node for node in self._order.nodes if node.op == "gradient"), None)
        if gradient is None:
            match = self._forward(self._product())
            self._check_whole({match.out, *match.rows.values()})
            self._check_outputs(match)
            return match
        match = self._backward(gradient)
        self._check_whole(set(gradient.outputs))
        return match

    # The pattern, from its end

    def _product(self) -> Node:
        writers = [self._order.writers[uid] for uid in self._order.outputs]
        products = [node for node in writers if node.op == "matmul"]
        if not products:
            refuse(writers[0], "attention ends with the product of probabilities and v", "matmul")
        return products[-1]

    def _forward(self, product: Node) -> AttentionMatch:
        self._take(product)
        if product.op != "matmul":
            refuse(product, "attention ends with the product of probabilities and v", "matmul")
        v = self._view(product, product.inputs[1], "v")
        node = self._writer(product, product.inputs[0], "probabilities must come from a softmax")
        dropout = None
        if node.op == "dropout":
            dropout = self._take(node)
            node = self._writer(node, node.inputs[0], "probabilities must come from a softmax")
        if node.op != "softmax":
            refuse(node, "probabilities must come from a softmax, or from the dropout behind it", "softmax")
        softmax = self._take(node)
        mask = block_mask = None
        scores = softmax.inputs[0]
        while (writer := self._order.writers.get(scores)) is not None and writer.op in ("mask", "block_mask"):
            if writer.op == "mask" and mask is None:
                mask = self._take(writer)
            elif writer.op == "block_mask" and block_mask is None:
                block_mask = self._take(writer)
            else:
                break
            scores = writer.inputs[0]
        dot = self._dot(softmax, scores)
        bias, scores = self._bias(scores, dot)
        scale, scaled = self._scale(dot)
        modification = None
        if scores != scaled or block_mask is not None:
            inputs = ScoreInputs(self._graph, scaled, self._tensor(dot.outputs[0]).dims)
            modification = inputs.modification(
                scores, block_mask, gradients=self._wrt is not None, deterministic=self._deterministic
            )
            self._used |= inputs.nodes
        rows = dict(zip(row_stats(softmax), softmax.outputs[1:], strict=True))
        if "stats" in rows:
            rows["lse"] = rows.pop("stats")
        q, k = self._view(dot, dot.inputs[0], "q"), self._view(dot, dot.inputs[1], "k")
        k = k._replace(transposed=not k.transposed)
        problem = self._problem(dot, product, q, k, v)
        problem = dataclasses.replace(
            problem,
            softmax_scale=scale,
            **_mask_fields(mask),
            bias=None if bias is None else self._bias_field(problem, bias),
            dropout_p=0.0 if dropout is None else dropout["probability"],
            return_lse="lse" in rows,
            lse_dtype=self._lse_dtype(rows.get("lse"), problem.dtype),
            score_max="score_max" in rows,
            score_sum_exp="score_sum_exp" in rows,
            score_mod=None if modification is None else modification.mod,
        )
        place = None if dropout is None else self._order.nodes.index(dropout)
        return AttentionMatch(problem, q, k, v, bias, modification, place, product.outputs[0], rows)

    def _backward(self, gradient: Node) -> AttentionMatch:
        self._take(gradient)
        self._wrt = set(gradient["wrt"])
        self._deterministic = ("deterministic", True) in gradient.attributes
        output, dout = gradient.inputs[:2]
        match = self._forward(self._writer(gradient, output, "gradients are of attention's output"))
        names = {match.q.uid: "q", match.k.uid: "k", match.v.uid: "v"}
        if match.bias is not None:
            names[match.bias] = "bias"
        for uid in gradient["wrt"]:
            if uid not in names:
                refuse(gradient, f"kernels give no gradient of tensor {uid}: only of q, k, v and a plainly added bias")
        self._check_read_once(gradient, match)
        if not gradient["forward"]:
            refuse(gradient, "kernels read what forward gave", "forward=(output, stats)")
        reads = [dout, *gradient["forward"]]
        for uid in reads:
            if uid in self._order.writers:
                refuse(self._order.writers[uid], f"kernels read tensor {uid}, so it must be an input", "an input")
        written = {names[uid]: out for uid, out in zip(gradient["wrt"], gradient.outputs, strict=True)}
        lse_dtype = self._lse_dtype(gradient["forward"][1], match.problem.dtype)
        dtypes = {"dout": match.problem.dtype, "out": match.problem.dtype, "stats": lse_dtype}
        for (name, dtype), uid in zip(dtypes.items(), reads, strict=True):
            self._check_dtype(uid, dtype, name)
        for uid, name in zip(gradient.outputs, (names[uid] for uid in gradient["wrt"]), strict=True):
            expected = match.problem.dtype if name != "bias" or match.bias is None else self._tensor(match.bias).dtype
            self._check_dtype(uid, expected, f"the gradient of {name}")
        problem = dataclasses.replace(
            match.problem,
            direction="backward",
            deterministic=self._deterministic,
            lse_dtype=lse_dtype,
            return_lse=False,
            score_max=False,
            score_sum_exp=False,
        )
        out, stats = gradient["forward"]
        return dataclasses.replace(match, problem=problem, gradients=Gradients(dout, out, stats, written))

    # Pieces

    def _dot(self, softmax: Node, scores: int) -> Node:
        products: dict[str, Node] = {}
        waiting, visited = [scores], set()
        while waiting:
            uid = waiting.pop()
            node = self._order.writers.get(uid)
            if node is None or node.name in visited:
                continue
            visited.add(node.name)
            if node.op == "matmul":
                products[node.name] = node
            elif node.op == "index":
                continue
            elif node.op in POINTWISE:
                waiting += node.inputs
            else:
                refuse(node, "between the product and the softmax kernels compute pointwise nodes alone", "select")
        if len(products) != 1:
            other = next(reversed(products.values()), softmax)
            reason = f"the softmax must be over one product of q and k, and there are {len(products)}"
            refuse(other, reason, "one matmul")
        return self._take(next(iter(products.values())))

    def _bias(self, scores: int, dot: Node) -> tuple[int | None, int]:
        """The bias that is added last, and the tensor that it is added to.

        In a backward graph, a bias whose gradient is not requested is part of the compiled modification instead.
        """
        node = self._order.writers.get(scores)
        if node is None or node.op != "add":
            return None, scores
        batch, heads, rows, keys = dims = self._score_dims(dot)
        q = self._tensor(self._view(dot, dot.inputs[0], "q").uid)
        for uid, other in (node.inputs, reversed(node.inputs)):
            tensor = self._tensor(uid)
            full = tensor.dims[2:] == (rows, keys) and tensor.dims[:1] in ((batch,), (1,))
            fits = full and len(tensor.dims) == 4 and tensor.dims[1] in (heads, 1)
            differentiated = self._wrt is None or uid in self._wrt
            if differentiated and uid not in self._order.writers and fits and tensor.dtype in (q.dtype, "float32"):
                if other not in self._order.writers or self._tensor(other).dims != dims:
                    continue
                self._take(node)
                return uid, other
        return None, scores

    def _scale(self, dot: Node) -> tuple[float, int]:
        """The constant that the product is multiplied by, and the result."""
        product = dot.outputs[0]
        readers = [node for node in self._order.readers[product] if node.op != "index"]
        if len(readers) == 1 and readers[0].op in ("mul", "div"):
            node = readers[0]
            first, second = (self._tensor(uid) for uid in node.inputs)
            if node.op == "mul" and first.by_value:
                first, second = second, first
            value = second.value
            constant = second.by_value and value is not None and math.isfinite(value) and (value or node.op == "mul")
            if first.uid == product and constant and value is not None:
                self._take(node)
                return float(value) if node.op == "mul" else 1.0 / value, node.outputs[0]
        return 1.0, product

    def _view(self, node: Node, uid: int, name: str) -> View:
        transposed = False
        while (writer := self._order.writers.get(uid)) is not None:
            if writer.op != "transpose":
                refuse(writer, f"{name} must be an input of the graph, at most transposed", "an input")
            self._take(writer)
            transposed = not transposed
            uid = writer.inputs[0]
        if self._tensor(uid).by_value or len(self._tensor(uid).dims) != 4:
            refuse(node, f"{name} must be (batch, heads, seq, dim), of four dims", "four dims")
        return View(uid, transposed)

    def _problem(self, dot: Node, product: Node, q: View, k: View, v: View) -> AttentionProblem:
        batch, heads_q, seq_q, dim = self._dims(q)
        batch_k, heads_kv, seq_kv, _ = self._dims(k)
        batch_v, heads_v, _, dim_v = self._dims(v)
        if batch_k != batch or heads_q % heads_kv:
            refuse(dot, f"q and k must share the batch, and k's heads divide q's: {(batch, heads_q)}", "equal batches")
        if (batch_v, heads_v) != (batch, heads_kv):
            refuse(product, f"v must have k's batch and heads, {(batch, heads_kv)}", f"{(batch, heads_kv)}")
        dtype = self._tensor(q.uid).dtype
        for name, view in (("k", k), ("v", v)):
            self._check_dtype(view.uid, dtype, name)
        if dtype not in ELEMENTS:
            raise Unsupported(f"tensor {q.uid}", dtype, f"attention is computed on {', '.join(ELEMENTS)}", "float32")
        element = ELEMENTS[dtype]
        return AttentionProblem(
            batch=batch,
            seqlen_q=seq_q,
            seqlen_k=seq_kv,
            total_q=batch * seq_q,
            total_k=batch * seq_kv,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=dim,
            head_dim_v=dim_v,
            dtype=dtype,
            kv_dtype=dtype,
            out_dtype=element.out,
            compute=element.computes[0],
            softmax_scale=1.0,
        )

    def _bias_field(self, problem: AttentionProblem, bias: int) -> tuple[str, bool, bool]:
        tensor = self._tensor(bias)
        one_batch = tensor.dims[0] == 1 and problem.batch > 1
        return tensor.dtype, one_batch, tensor.dims[1] == 1 and problem.heads_q > 1

    # Checks of the whole graph

    def _check_whole(self, results: set[int]) -> None:
        for node in self._order.nodes:
            if node.name not in self._used:
                refuse(
                    node, "is no part of the graph's attention, and one launch answers nothing else", "attention alone"
                )
        for uid in self._order.outputs:
            if uid not in results:
                writer = self._order.writers[uid]
                refuse(writer, f"kernels keep tensor {uid} on chip: it cannot be an output", "a virtual tensor")

    def _check_outputs(self, match: AttentionMatch) -> None:
        self._check_dtype(match.out, match.problem.out_dtype, "the output")
        for name, uid in match.rows.items():
            if not self._tensor(uid).virtual:
                dtype = match.problem.lse_dtype if name == "lse" else "float32"
                self._check_dtype(uid, dtype, "the stats" if name == "lse" else name)

    def _check_read_once(self, gradient: Node, match: AttentionMatch) -> None:
        """Refuse the gradient of a tensor that is read in several places: kernels compute the gradient of one place."""
        read = [match.q.uid, match.k.uid, match.v.uid, *(() if match.bias is None else (match.bias,))]
        read += () if match.modification is None else match.modification.tensors
        for uid in gradient["wrt"]:
            if read.count(uid) > 1:
                reason = f"tensor {uid} is read in {read.count(uid)} places, and kernels give the gradient of one: "
                refuse(gradient, f"{reason}name the array by another uid in each, and add their gradients", "one place")

    def _lse_dtype(self, stats: int | None, dtype: str) -> str:
        wide = stats is not None and dtype == self._tensor(stats).dtype == "float64"
        return "float64" if wide else "float32"

    def _check_dtype(self, uid: int, dtype: str, name: str) -> None:
        tensor = self._tensor(uid)
        if tensor.dtype != dtype:
            raise Unsupported(f"tensor {uid}", tensor.dtype, f"{name} must be {dtype} for these inputs", dtype)

    # Look-ups

    def _take(self, node: Node) -> Node:
        self._used.add(node.name)
        return node

    def _tensor(self, uid: int) -> GraphTensor:
        return self._graph.tensors[uid]

    def _writer(self, reader: Node, uid: int, reason: str) -> Node:
        writer = self._order.writers.get(uid)
        if writer is None:
            refuse(reader, f"{reason}, and tensor {uid} is an input", "softmax")
        return writer

    def _dims(self, view: View) -> tuple[int, ...]:
        dims = self._tensor(view.uid).dims
        return (*dims[:2], dims[3], dims[2]) if view.transposed else dims

    def _score_dims(self, dot: Node) -> tuple[int, ...]:
        dims = self._tensor(dot.outputs[0]).dims
        if len(dims) != 4:
            refuse(dot, "scores must be (batch, heads, rows, keys), of four dims", "four dims")
        return dims


def _mask_fields(node: Node | None) -> dict[str, Any]:
    if node is None:
        return {}
    mask = Mask(node["kind"], node["width"])
    return {"causal": mask.is_causal, "window_size": mask.window, "alignment": node["alignment"]}
