"""Modification: the pointwise nodes between the product and the softmax, in the form that a kernel takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_actors.attention.mha import Mask
from gpu_actors.attention.score_mod import ScoreMod, ScoreScalar, ScoreTensor
from gpu_actors.errors import Unsupported
from gpu_actors.graph.cuda import score_mod
from gpu_actors.graph.expression import Expression, combine, in_order, leaf, real
from gpu_actors.graph.ops import Node
from gpu_actors.graph.tensor import GraphTensor

if TYPE_CHECKING:
    from gpu_actors.graph.graph import OperationGraph

__all__ = ["Modification", "ScoreInputs"]

# So many fit easily into a kernel's parameters.
MAX_TENSORS, MAX_SCALARS = 16, 64


@dataclass(frozen=True, slots=True)
class Modification:
    """A score modification and its operands.

    mod: the modification as the kernel takes it.
    tensors: uids, by slot.
    scalars: by slot, a uid (None for a known number) and the number.
    """

    mod: ScoreMod
    tensors: tuple[int, ...]
    scalars: tuple[tuple[int | None, float], ...]


class ScoreInputs:
    """Collects the inputs of a modification. score: uid of the scaled product. dims: dims of the scores."""

    def __init__(self, graph: OperationGraph, score: int, dims: tuple[int, ...]) -> None:
        self._graph = graph
        self._order = graph.order()
        self._dims = dims
        self._tensors: dict[int, ScoreTensor] = {}
        self._scalars: list[tuple[int | None, float, ScoreScalar]] = []
        self._score = leaf("score", "real")
        self._expressions: dict[int, Expression] = {score: self._score}
        self.nodes: set[str] = set()

    def modification(
        self, root: int, block_mask: Node | None = None, *, gradients: bool = False, deterministic: bool = False
    ) -> Modification:
        """The expression between the product and the tensor ``root``, and the lists of a block mask after it.

        gradients: whether kernels read the lists of rows.
        deterministic: whether they also read the lists of keys.
        Raises Unsupported with the name of the node.
        """
        needed = self._needed(root)
        for node in self._order.nodes:
            if node.name in needed:
                self.nodes.add(node.name)
                self._expressions[node.outputs[0]] = self._expression(node)
        scalars = tuple(scalar for _, _, scalar in self._scalars)
        real_type = "double" if self._in_double(root) else "float"
        expression = real(f"tensor {root}", self._expressions[root])
        size = None if block_mask is None else block_mask["block_size"]
        if block_mask is not None:
            self._lists(block_mask, gradients, deterministic)
        tensors = tuple(self._tensors.values())
        full_expression = None
        if block_mask is not None and len(block_mask.inputs) > (5 if block_mask["transposed"] else 3):
            full_root = self._without_mask_mods(root)  # the mask has lists of full blocks
            full_expression = None if full_root == root else real(f"tensor {full_root}", self._expressions[full_root])
        mod = score_mod(expression, self._score, tensors, scalars, real_type, size, full_expression)
        return Modification(mod, tuple(self._tensors), tuple((uid, value) for uid, value, _ in self._scalars))

    def _without_mask_mods(self, root: int) -> int:
        """The tensor that replaces ``root`` in full blocks: without each `mask_mod` directly before the lists.

        A `mask_mod` shows every key of full blocks. Other nodes that select -inf, for example at the end of a
        score_mod, hide keys in these blocks too, and stay.
        """
        while (node := self._order.writers.get(root)) is not None and ("mask_mod", True) in node.attributes:
            condition, visible, _ = node.inputs
            if any(part is self._score for part in in_order((self._expressions[condition],))):
                break
            root = visible
        return root

    def _in_double(self, root: int) -> bool:
        """Whether any tensor on the way to ``root`` is float64. A comparison of float64 numbers is itself a bool."""
        nodes = [node for node in self._order.nodes if node.name in self.nodes]
        read = {uid for node in nodes if node.op != "index" for uid in node.inputs}
        return any(self._graph.tensors[uid].dtype == "float64" for uid in {root, *read})

    def _needed(self, root: int) -> set[str]:
        """The nodes between the score and ``root``, indices included. The inputs of an index are not computed."""
        names: set[str] = set()
        waiting = [root]
        while waiting:
            uid = waiting.pop()
            node = self._order.writers.get(uid)
            if uid in self._expressions or node is None or node.name in names:
                continue
            names.add(node.name)
            if node.op != "index":
                waiting += node.inputs
        return names

    def _expression(self, node: Node) -> Expression:
        if node.op == "index":
            return self._index(node)
        args = tuple(self._operand(node, uid) for uid in node.inputs)
        if node.op == "mask":
            return self._mask(node, args[0])
        return combine(node.name, node.op, args)

    def _operand(self, node: Node, uid: int) -> Expression:
        if uid not in self._expressions:
            tensor = self._graph.tensors[uid]
            self._expressions[uid] = self._scalar(node, tensor) if tensor.by_value else self._tensor(node, tensor)
        return self._expressions[uid]

    def _scalar(self, node: Node, tensor: GraphTensor) -> Expression:
        if tensor.dtype == "uint64":
            raise Unsupported(node.name, tensor.dtype, "computes with numbers, and uint64 is for seeds", "int32")
        return self._add_scalar(node, tensor.uid, tensor.value, "int32" if tensor.dtype == "int32" else "float64")

    def _add_scalar(self, node: Node, uid: int | None, value: float | None, dtype: str) -> Expression:
        if len(self._scalars) == MAX_SCALARS:
            raise Unsupported(node.name, node.op, f"kernels take {MAX_SCALARS} scalars of a modification", MAX_SCALARS)
        slot = len(self._scalars)
        self._scalars.append((uid if value is None else None, 0.0 if value is None else value, ScoreScalar(dtype)))
        if dtype != "int32":
            return leaf("scalar", "real", slot)
        return leaf("scalar", "int", slot) if value is None else leaf("scalar", "int", slot, (int(value), int(value)))

    def _tensor(self, node: Node, tensor: GraphTensor) -> Expression:
        if len(tensor.dims) != 4 or any(
            extent not in (1, full) for extent, full in zip(tensor.dims, self._dims, strict=True)
        ):
            extents = ", ".join(f"1 or {extent}" for extent in self._dims)
            reason = f"kernels read tensors of four dims beside the scores, ({extents}); tensor {tensor.uid} is another"
            raise Unsupported(node.name, tensor.dims, reason, self._dims)
        if len(self._tensors) == MAX_TENSORS:
            raise Unsupported(node.name, node.op, f"kernels take {MAX_TENSORS} tensors of a modification", MAX_TENSORS)
        axes = "".join(axis for axis, extent in zip("bhrk", tensor.dims, strict=True) if extent > 1)
        slot = len(self._tensors)
        self._tensors[tensor.uid] = ScoreTensor(tensor.dtype, axes)
        return leaf("tensor", "int" if tensor.dtype == "int32" else "bool" if tensor.dtype == "bool" else "real", slot)

    def _lists(self, node: Node, gradients: bool, deterministic: bool) -> None:
        lists = node.inputs[1:]
        half = 0
        if node["transposed"]:
            half = len(lists) // 2
            of_keys, of_rows = lists[:half], lists[half:]
            lists = (*of_rows, *(of_keys if deterministic else ())) if gradients else of_keys
        elif gradients:
            reason = "kernels of gradients walk along the lists of rows"
            raise Unsupported(node.name, node.op, reason, "q_num_blocks and q_indices")
        if len(self._tensors) + len(lists) > MAX_TENSORS or any(uid in self._tensors for uid in lists):
            reason = (
                f"kernels take {MAX_TENSORS} tensors of a modification, lists included, and read lists as such alone"
            )
            raise Unsupported(node.name, node.op, reason, MAX_TENSORS)
        if len(set(lists)) != len(lists):
            raise Unsupported(node.name, node.op, "kernels read each list under a uid of its own", "one uid a list")
        for n, uid in enumerate(lists):
            axes = "bhKR" if gradients and n < half else "bhRK"
            axes = axes if n % 2 else axes[:3]
            dims = self._graph.tensors[uid].dims
            strided = "".join(axis for axis, extent in zip(axes, dims, strict=True) if extent > 1 or axis in "RK")
            self._tensors[uid] = ScoreTensor("int32", strided, axes)

    def _index(self, node: Node) -> Expression:
        like = self._graph.tensors[node.inputs[0]]
        axis = node["axis"] % len(like.dims)
        if len(like.dims) != 4 or like.dims[axis] != self._dims[axis]:
            reason = f"kernels count along the dims of the scores, {self._dims}: take the index of those"
            raise Unsupported(node.name, like.dims, reason, self._dims)
        return leaf("index", "int", axis, (0, self._dims[axis] - 1))

    def _mask(self, node: Node, scores: Expression) -> Expression:
        """The mask as conditions, because it is not directly before the softmax, where kernels would apply it."""
        like = self._graph.tensors[node.inputs[0]].dims
        if len(like) != 4 or like[2:] != self._dims[2:]:
            reason = f"kernels count rows and keys along the dims of the scores, {self._dims}: mask what has those"
            raise Unsupported(node.name, like, reason, self._dims)
        mask = Mask(node["kind"], node["width"])
        rows, keys = self._dims[2:]
        left, right = (min(bound, rows + keys) for bound in mask.window)  # no row and key are further apart
        row, key = leaf("index", "int", 2, (0, rows - 1)), leaf("index", "int", 3, (0, keys - 1))
        shift = keys - rows if node["alignment"] == "bottom_right" else 0
        diagonal = combine(node.name, "add", (row, self._add_scalar(node, None, shift, "int32")))
        conditions = []
        if mask.is_causal:
            conditions.append(combine(node.name, "le", (key, diagonal)))
        if left >= 0:
            first = combine(node.name, "sub", (diagonal, self._add_scalar(node, None, left, "int32")))
            conditions.append(combine(node.name, "ge", (key, first)))
        if right >= 0:
            last = combine(node.name, "add", (diagonal, self._add_scalar(node, None, right, "int32")))
            conditions.append(combine(node.name, "le", (key, last)))
        visible = conditions[0]
        for condition in conditions[1:]:
            visible = combine(node.name, "logical_and", (visible, condition))
        hidden = self._add_scalar(node, None, float("-inf"), "float64")
        return combine(node.name, "select", (visible, scores, hidden))
