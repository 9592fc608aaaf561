"""GraphPlanner: plans and kernels of the actor that answers operation graphs; outlives its incarnations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import FP8
from gpu_actors.graph.binding import bind_arrays
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.planning.graph_plan import GraphPlan, graph_plan
from gpu_actors.planning.plan import PlanCache
from gpu_actors.planning.planner import AttentionPlanner
from gpu_actors.planning.tma_eligibility import alignments, eligible_families
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call

__all__ = ["GraphPlanner"]

_IN_TILES = ("float16", "bfloat16", *FP8)


class GraphPlanner(AttentionPlanner):
    """`AttentionPlanner` that takes graphs too. Plans of graphs and of requests lie in one cache."""

    plans: PlanCache[Any]

    def inspect(self, graph: OperationGraph) -> GraphPlan:
        _check_graph(graph)
        return graph_plan(graph, self.device, True, self.accumulate)

    def execute(self, actor: ServiceActor, call: Call[Any], graph: OperationGraph, arrays: Mapping[int, Any]) -> None:
        """Launch a graph, or park its call until its kernels are compiled."""
        _check_graph(graph)
        with reading(call.message):
            given = bind_arrays(graph, arrays, self.device_name, call.caller_notes)
            # Those like q, k and v, which kernels may load in tiles.
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
