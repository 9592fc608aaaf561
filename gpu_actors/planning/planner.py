"""AttentionPlanner: leads actors that answer attention requests from a request's signature to its kernels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from gpu_actors.arrays.request_arrays import is_brief
from gpu_actors.attention.requests import FlashBackward, FlashForward
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Device, Kernels
from gpu_actors.options import MockOptions
from gpu_actors.planning.backward import backward_plan, backward_signature, bind_backward
from gpu_actors.planning.cached import Decoding
from gpu_actors.planning.forward import bind_forward, call_signature, forward_plan, forward_signature, is_plain
from gpu_actors.planning.kernel_store import KernelStore
from gpu_actors.planning.plan import Plan, PlanCache, Planned
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.completion import Finish
from gpu_actors.validation.forward import SEEDS, check_seed

__all__ = ["AttentionPlanner", "Workbench"]


_NONE = Kernels(())


class Workbench:
    """What an actor that launches attention keeps through its incarnations: plans of requests over caches, and the
    kernels of the context.

    accumulate: the dtype that the NumPy oracle sums in.
    """

    def __init__(self, cell: ActorCell) -> None:
        environment = cell.environment
        self.device: Device = environment.device
        self.device_name: str = self.device.info.device_name
        self.runs_kernels: bool = self.device.info.runs_kernels
        self.accumulate = (environment.options.mock or MockOptions()).dtype
        self.kernels: KernelStore | None = environment.kernels if environment.compiles else None
        self._cell = cell
        self.decoding: Decoding = Decoding(self.device, self.accumulate)

    def kernels_of(self, call: Call[Any], variants: tuple[Variant, ...]) -> Kernels | None:
        """Return the loaded kernels of a launch, which are none if the device runs none.

        Returns None if it parked the call until they are compiled.
        """
        if self.kernels is None or not variants:
            return _NONE
        kernels = self.kernels.get(variants, self._cell)
        if kernels is None:
            self.kernels.wait_for(variants, call, self._cell)
            return None
        return kernels if self.runs_kernels else _NONE


class AttentionPlanner(Workbench):
    """The plans and kernels of an actor that answers attention requests. They outlive its incarnations."""

    def __init__(self, cell: ActorCell, plans: int) -> None:
        super().__init__(cell)
        self.plans: PlanCache[Plan] = PlanCache(plans)

    def recall(self, request: FlashForward, options: Mapping[str, Any] | None = None) -> Planned[Plan] | None:
        """Return the plan of a request as the caller gave it, if the request is plain and a plan is kept for it.

        Any thread may call it. It raises nothing. options: what the caller gave besides q, k and v, if known.
        Nothing in a request that has such a plan runs the caller's code.
        """
        try:
            called = None if options is None else call_signature(request, options)
            planned = self.plans.called.get(called)
            if planned is not None:
                return planned
            seed = request.dropout_seed
            if not is_plain(request) or type(seed) is not int or not 0 <= seed < SEEDS:
                return None
            planned = self.plans.peek(forward_signature(request, True), called)
            if planned is not None and planned.brief is None:
                planned.brief = is_brief(request)
            return planned
        except Exception:
            return None  # `plan`, which comes next, meets the same error

    def plan(self, request: FlashForward, plain: bool) -> Plan:
        """Return the plan of an adopted request, after a check of its seed."""
        seed = request.dropout_seed
        if type(seed) is not int or not 0 <= seed < SEEDS:
            with reading(request):
                check_seed(seed)

        def signature() -> Hashable:
            if isinstance(request, FlashBackward):
                return backward_signature(request, plain)
            return forward_signature(request, plain)

        def make() -> Plan:
            with reading(request):
                if isinstance(request, FlashBackward):
                    return backward_plan(request, self.device, self.accumulate)
                return forward_plan(request, self.device, self.accumulate)

        return self.plans.of(signature, make)

    def answer(self, actor: ServiceActor, call: Call[Any], request: FlashForward, plain: bool, finish: Finish) -> None:
        """Launch an adopted request, forward or backward, or park it until its kernels are compiled."""
        plan = self.plan(request, plain) if call.prepared is None else self.plans.use(call.prepared)
        kernels = _NONE if self.kernels is None else self.kernels_of(call, plan.variants)
        if kernels is None:
            return
        if call.prepared is not None:
            launch = bind_forward(plan, request, plain, kernels)
        else:
            with reading(request):
                if isinstance(request, FlashBackward):
                    launch = bind_backward(plan, request, kernels)
                else:
                    launch = bind_forward(plan, request, plain, kernels)
        if call.claim():
            actor.launch((call,), launch, finish)
