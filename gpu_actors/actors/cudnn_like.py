"""CudnnLikeActor: operation graphs, and attention in cuDNN's layout, with plans cached by signature."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpu_actors.arrays.request_arrays import adopt_request
from gpu_actors.attention.mha import AttentionParams, MhaBackward, MhaForward, MhaOutput
from gpu_actors.attention.requests import Array, AttentionGradients, FlashForward
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.planning.forward import is_plain
from gpu_actors.planning.graph_plan import GraphPlan, GraphPlanner
from gpu_actors.planning.mha import backward_request, forward_request, mha_gradients, mha_output
from gpu_actors.planning.plan import PlanCacheStats
from gpu_actors.runtime.actor import ServiceActor
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.completion import Finish
from gpu_actors.runtime.handle import ActorHandle
from gpu_actors.runtime.reply import Reply

__all__ = ["CudnnLikeActor", "CudnnLikeHandle", "ExecuteGraph"]

_PLANS = 256


@dataclass(slots=True, eq=False)
class ExecuteGraph:
    """The message of ``execute``. arrays: by uid, the arrays of the graph's inputs, and the numbers of its scalars."""

    graph: OperationGraph
    arrays: Mapping[int, Any]


class CudnnLikeHandle(ActorHandle):
    """``ctx.cudnn``."""

    __slots__ = ()

    def execute(
        self,
        graph: OperationGraph,
        arrays: Mapping[int, Array | float],
        *,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[dict[int, Array]]:
        """Compute a graph. Returns at once.

        arrays: by uid, an array for every input of the graph, with its dims, dtype and strides; and a number for every
        scalar without a value. The reply gives the graph's outputs by uid, as arrays of the same kind as q, or as the
        first array if the graph is not attention. It raises `InvalidRequest` if the graph is not valid or an array does
        not match, and `Unsupported`, with the node, the reason and the nearest form, if no kernel computes the graph.
        The mock device computes every graph. Do not change graph or arrays before the reply is done.
        deadline, timeout, priority: as in `ActorHandle.submit`.
        """
        return self.submit(ExecuteGraph(graph, arrays), deadline=deadline, timeout=timeout, priority=priority)

    def inspect_plan(self, graph: OperationGraph) -> GraphPlan:
        """How a device with kernels would answer a graph, even if this context's device has none. Launches nothing.

        Raises `InvalidRequest` and `Unsupported` directly, because there is no reply.
        """
        planner: GraphPlanner = self._cell.shared
        return planner.inspect(graph)

    def mha_forward(
        self,
        params: AttentionParams,
        q: Array,
        k: Array,
        v: Array,
        *,
        bias: Array | None = None,
        return_stats: bool = False,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[MhaOutput]:
        """Multi-head attention on (batch, heads, seq, dim). The arguments are those of `MhaForward`.

        The reply gives an `MhaOutput`, or raises `InvalidRequest` if an array does not match the params.
        """
        request = MhaForward(params=params, q=q, k=k, v=v, bias=bias, return_stats=return_stats)
        return Reply(self.send(request, deadline, timeout, priority))

    def mha_backward(
        self,
        params: AttentionParams,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        do: Array,
        stats: Array,
        *,
        bias: Array | None = None,
        deterministic: bool = False,
        deadline: float | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply[AttentionGradients]:
        """The gradients of sum(o * do) by q, k, v and the bias. The arguments are those of `MhaBackward`.

        The reply gives `AttentionGradients`, each shaped like its input, dbias None without a bias; or raises
        `InvalidRequest` if an array does not match the params.
        """
        request = MhaBackward(
            params=params, q=q, k=k, v=v, o=o, do=do, stats=stats, bias=bias, deterministic=deterministic
        )
        return Reply(self.send(request, deadline, timeout, priority))

    def plan_cache_stats(self) -> PlanCacheStats:
        """Statistics of the plan cache: hits, misses, evicted, entries."""
        planner: GraphPlanner = self._cell.shared
        return planner.plans.stats()


class CudnnLikeActor(ServiceActor):
    """Answers operation graphs, and attention in cuDNN's layout."""

    label: ClassVar[str] = "cudnn"
    handle_type: ClassVar[type[ActorHandle]] = CudnnLikeHandle
    takes: ClassVar[tuple[type, ...]] = (MhaForward, MhaBackward, ExecuteGraph)
    vital: ClassVar[bool] = True

    @classmethod
    def make_shared(cls, cell: ActorCell) -> GraphPlanner:
        return GraphPlanner(cell, plans=_PLANS)

    def open(self) -> None:
        self._planner: GraphPlanner = self.cell.shared

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if isinstance(message, ExecuteGraph):
            self._planner.execute(self, call, message.graph, message.arrays)
        elif isinstance(message, MhaForward | MhaBackward):
            self._attend(call, message)
        else:
            raise self.refusal(message)

    def _attend(self, call: Call[Any], message: MhaForward | MhaBackward) -> None:
        planner = self._planner
        adopted, template = adopt_request(message, planner.device_name, call.caller_notes)
        request: FlashForward
        finish: Finish
        if isinstance(adopted, MhaForward):
            request, finish = forward_request(adopted), functools.partial(mha_output, template)
        else:
            request, finish = backward_request(adopted), functools.partial(mha_gradients, template)
        planner.answer(self, call, request, is_plain(request), finish)
