"""GraphPlan: how a device answers a graph. GraphPlanner makes one plan for all graphs of the same signature.

If kernels compute the graph, the plan names the tensors that become their operands. On the mock device NumPy computes
the graph. Outputs lie in memory as the graph's strides say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import AnyArray, restore
from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.score_mod import ScoreMod
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import (
    Buffer,
    Device,
    Kernel,
    Launch,
    Outputs,
    OutputSpec,
    Params,
    StepPack,
)
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import FP8
from gpu_actors.graph.binding import Binding, bind_arrays, memory_order
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.match import AttentionMatch, match_attention
from gpu_actors.kernels.dispatch import FAMILIES, answering_key, dispatch_key
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.program import Program, Values
from gpu_actors.kernels.variants import variants_of
from gpu_actors.planning.plan import PlanCache, program_for
from gpu_actors.planning.planner import AttentionPlanner
from gpu_actors.planning.tma_eligibility import alignments, eligible_families
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call

__all__ = ["GraphPlan", "GraphPlanner", "Result", "graph_plan"]

# The axes of (batch, heads, rows, dim), in the order of the kernels.
_ROWS_FIRST = (0, 2, 1, 3)
_DIM_FIRST = (0, 3, 1, 2)
_STATS = (0, 1, 2)
_BIAS = (0, 1, 2, 3)
_IN_TILES = ("float16", "bfloat16", *FP8)


@dataclass(frozen=True, slots=True)
class Result:
    """An output. name: that in the launch. memory: its axes in memory order. kernel: its axes in a kernel, or None.

    uid: None for a gradient that was not asked for.
    """

    uid: int | None
    name: str
    spec: OutputSpec
    memory: tuple[int, ...]
    kernel: tuple[int, ...] | None = None

    def buffer_of(self, buffer: Buffer) -> Buffer:
        """Return the buffer with its axes as a kernel has them."""
        assert self.kernel is not None
        back = _inverse(self.memory)
        axes = [back[axis] for axis in self.kernel]
        shape, strides = (tuple(values[axis] for axis in axes) for values in (buffer.shape, buffer.strides))
        return Buffer(buffer.address, shape, strides, buffer.dtype)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """match: the graph as attention, None if it is no attention and NumPy computes it. key: that of its kernel.

    program: what is launched; None if NumPy answers. variants: those of the kernels that `bind` takes, in their order.
    """

    signature: str
    match: AttentionMatch | None
    key: DispatchKey | None
    program: Program | None
    results: tuple[Result, ...]
    accumulate: str
    variants: tuple[Variant, ...]

    @property
    def keys(self) -> tuple[DispatchKey, ...]:
        """The keys of `variants`."""
        return () if self.program is None else self.program.keys

    def bind(self, graph: OperationGraph, given: Binding, kernels: Sequence[Kernel]) -> Launch:
        """Return a launch on one request's arrays. graph: any of this signature. kernels: of `variants`, or none."""
        outputs = {result.name: result.spec for result in self.results}
        oracle = functools.partial(self._oracle, graph, {**given.arrays, **given.numbers})
        if self.match is None:
            return Launch(None, {f"tensor_{uid}": array for uid, array in given.arrays.items()}, outputs, oracle)
        inputs = _operands(self.match, given)
        program = self.program
        if program is None or not kernels:
            return Launch(self.key, inputs, outputs, oracle)
        scalars = () if self.match.modification is None else self.match.modification.scalars
        numbers = [value if uid is None else given.numbers[uid] for uid, value in scalars]
        values = Values(_seed(self.match, graph, given), numbers)
        steps = tuple(
            step._replace(pack=functools.partial(self._pack, step.pack)) for step in program.steps(kernels, values)
        )
        return Launch(self.key, inputs, outputs, oracle, steps, program.scratch)

    def answer(self, given: Binding, outputs: Outputs) -> Sequence[dict[int, Any]]:
        """Arrays by uid, of the kind of the request's q, or of its first array if the graph is no attention."""
        first = next(iter(given.arrays)) if self.match is None else self.match.q.uid
        template = given.foreign.get(first)
        found: dict[int, Any] = {}
        for result in self.results:
            if result.uid is not None:
                array = outputs[result.name].transpose(*_inverse(result.memory))
                found[result.uid] = array if template is None else restore(array, template)
        return (found,)

    def _pack(self, pack: StepPack, buffers: Mapping[str, Buffer]) -> Params:
        seen = dict(buffers)
        for result in self.results:
            seen[result.name] = result.buffer_of(buffers[result.name])
        return pack(seen)

    def _oracle(self, graph: OperationGraph, values: Mapping[int, Any], inputs: Mapping[str, Any]) -> Outputs:
        # Imported here because only programs on a mock device compute in NumPy.
        from gpu_actors.reference.graph import evaluate_graph

        found = evaluate_graph(graph, values, self.accumulate)
        return {
            result.name: np.ascontiguousarray(found[result.uid].transpose(*result.memory))
            for result in self.results
            if result.uid is not None
        }


def graph_plan(
    graph: OperationGraph,
    device: Device,
    runs_kernels: bool,
    accumulate: str,
    families: tuple[KernelFamily, ...] = FAMILIES,
) -> GraphPlan:
    """Plan a sound graph for a device. Raises Unsupported, naming the node, if no kernel computes it.

    runs_kernels: if False, NumPy computes a graph that is no attention, or that no kernel takes. families: the forward
    kernels to choose from, because some kernels cannot read some arrays.
    """
    match: AttentionMatch | None = None
    key: DispatchKey | None = None
    program: Program | None = None
    try:
        match = match_attention(graph)
        _check_contiguous(graph, match)
        if device.info.invariant:
            match = dataclasses.replace(match, problem=_invariant(match))
        if match.gradients is None:
            key = dispatch_key(match.problem, device.info.arch, families, device.barred)
        else:
            key = answering_key(match.problem, device.info.arch, runs_kernels, barred=device.barred)
        program = program_for(match.problem, key, device)
    except Unsupported:
        if runs_kernels:
            raise
        match = key = program = None
    results = _results(graph, match, runs_kernels)
    return GraphPlan(graph.signature(), match, key, program, tuple(results), accumulate, variants_of(program))


def _invariant(match: AttentionMatch) -> AttentionProblem:
    """The problem of a match in an invariant context."""
    problem = dataclasses.replace(match.problem, invariant=True)
    if match.gradients is None or problem.deterministic:
        return problem
    if problem.score_mod is not None and problem.score_mod.block_size is not None:
        reason = "blocks of a mask take turns only where the graph's gradient says so, and reads the lists of keys"
        raise Unsupported("deterministic", False, reason, True)
    return dataclasses.replace(problem, deterministic=True)


def _check_contiguous(graph: OperationGraph, match: AttentionMatch) -> None:
    """Check that kernels can read and write whole rows instead of single elements."""
    wanted: dict[int, int] = {view.uid: 2 if view.transposed else 3 for view in (match.q, match.k, match.v)}
    wanted |= dict.fromkeys((match.out,) if match.bias is None else (match.out, match.bias), 3)
    if match.gradients is not None:
        given = match.gradients
        wanted |= dict.fromkeys((given.dout, given.out), 3)
        operands = _kernel_inputs(match)
        wanted |= {uid: wanted[operands[name][0]] for name, uid in given.written.items()}
    for uid, axis in wanted.items():
        tensor = graph.tensors[uid]
        if tensor.dims[axis] > 1 and tensor.strides[axis] != 1:
            reason = f"kernels take whole rows at a time: the stride of dim {axis} must be 1"
            packed = contiguous_strides([*tensor.dims[:axis], *tensor.dims[axis + 1 :], tensor.dims[axis]], 1)
            nearest = (*packed[:axis], 1, *packed[axis:-1])
            raise Unsupported(f"tensor {uid}", tensor.strides, reason, nearest)


def _results(graph: OperationGraph, match: AttentionMatch | None, runs_kernels: bool) -> list[Result]:
    known = {} if match is None else _names(match)
    results = []
    for uid in graph.order().outputs:
        tensor = graph.tensors[uid]
        memory = memory_order(tensor)
        name, kernel = known.get(uid, (f"tensor_{uid}", None))
        spec = OutputSpec(tuple(tensor.dims[axis] for axis in memory), tensor.dtype)
        results.append(Result(uid, name, spec, memory, kernel))
    if match is not None and match.gradients is not None and runs_kernels:
        # The kernels write every gradient, in whole rows, whether it was asked for or not.
        for name, (uid, axes) in _kernel_inputs(match).items():
            if name not in match.gradients.written:
                operand = graph.tensors[uid]
                spec = OutputSpec(tuple(operand.dims[axis] for axis in axes), operand.dtype)
                results.append(Result(None, f"d{name}", spec, axes, axes))
    return results


def _names(match: AttentionMatch) -> dict[int, tuple[str, tuple[int, ...]]]:
    """The outputs by uid: their names in kernels, and the axes that kernels take."""
    if match.gradients is not None:
        operands = _kernel_inputs(match)
        return {uid: (f"d{name}", operands[name][1]) for name, uid in match.gradients.written.items()}
    names: dict[int, tuple[str, tuple[int, ...]]] = {match.out: ("out", _ROWS_FIRST)}
    return names | {uid: (name, _STATS) for name, uid in match.rows.items()}


def _kernel_inputs(match: AttentionMatch) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The operands that have gradients, by a kernel's names: uids, and which axes are batch, rows, heads and dim.

    k may come as (batch, heads, dim, rows).
    """
    views = {"q": match.q, "k": match.k, "v": match.v}
    found: dict[str, tuple[int, tuple[int, ...]]]
    found = {name: (view.uid, _DIM_FIRST if view.transposed else _ROWS_FIRST) for name, view in views.items()}
    return found if match.bias is None else found | {"bias": (match.bias, _BIAS)}


def _operands(match: AttentionMatch, given: Binding) -> dict[str, AnyArray]:
    """A kernel's inputs by name, in its order of axes. Only strides change: heads and rows swap places."""
    arrays = given.arrays
    operands = {name: arrays[uid].transpose(*axes) for name, (uid, axes) in _kernel_inputs(match).items()}
    if match.gradients is not None:
        operands["out"] = arrays[match.gradients.out].transpose(*_ROWS_FIRST)
        operands["dout"] = arrays[match.gradients.dout].transpose(*_ROWS_FIRST)
        operands["lse"] = arrays[match.gradients.stats][..., 0]
    if match.modification is not None:
        for n, uid in enumerate(match.modification.tensors):
            operands[ScoreMod.tensor_name(n)] = arrays[uid]
    return operands


def _seed(match: AttentionMatch, graph: OperationGraph, given: Binding) -> int:
    if match.dropout is None:
        return 0
    node = graph.order().nodes[match.dropout]
    if len(node.inputs) == 1:
        return node.seed
    tensor = graph.tensors[node.inputs[1]]
    return int(given.numbers[tensor.uid] if tensor.value is None else tensor.value)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))


class GraphPlanner(AttentionPlanner):
    """An `AttentionPlanner` that takes graphs, too. One cache holds the plans of graphs and of requests."""

    plans: PlanCache[Any]

    def inspect(self, graph: OperationGraph) -> GraphPlan:
        _check_graph(graph)
        return graph_plan(graph, self.device, True, self.accumulate)

    def execute(self, actor: ServiceActor, call: Call[Any], graph: OperationGraph, arrays: Mapping[int, Any]) -> None:
        """Launch a graph, or park its call until its kernels are compiled."""
        _check_graph(graph)
        with reading(call.message):
            given = bind_arrays(graph, arrays, self.device_name, call.caller_notes)
            # Arrays like q, k and v, which kernels may load in tiles.
            tiles = {
                f"tensor {uid}": array
                for uid, array in given.arrays.items()
                if array.ndim == 4 and array.dtype.name in _IN_TILES
            }

            def make() -> GraphPlan:
                return graph_plan(graph, self.device, self.runs_kernels, self.accumulate, eligible_families(tiles))

            plan: GraphPlan = self.plans.of(lambda: (graph.signature(), alignments(*tiles.values())), make)
        kernels = () if self.kernels is None else self.kernels_of(call, plan.variants)
        if kernels is None:
            return
        launch = plan.bind(graph, given, kernels)
        if call.claim():
            actor.launch((call,), launch, lambda outputs: plan.answer(given, outputs))


def _check_graph(graph: object) -> None:
    if not isinstance(graph, OperationGraph):
        raise InvalidRequest("graph", type(graph).__name__, "must be an OperationGraph")
