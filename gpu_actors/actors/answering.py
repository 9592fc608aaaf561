"""Attention: what the actors that answer attention requests know, from the signature of a request to its kernels."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gpu_actors.actors.attention import AttentionPlan, forward_plan, forward_signature, is_plain
from gpu_actors.actors.base import ServiceActor
from gpu_actors.actors.call import Call
from gpu_actors.actors.completion import Finish
from gpu_actors.actors.decoding import CacheLaunch, Decoding
from gpu_actors.actors.gradients import BackwardPlan, backward_plan, backward_signature
from gpu_actors.actors.kernel_store import KernelStore
from gpu_actors.devices.interface import Kernel
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.options import MockOptions
from gpu_actors.plans import PlanCache, Planned
from gpu_actors.requests import FlashBackward, FlashForward

if TYPE_CHECKING:
    from gpu_actors.actors.post import Post
    from gpu_actors.actors.services import Services

__all__ = ["Attention", "place_of", "unreadable"]

logger = logging.getLogger("gpu_actors")


class Attention:
    """Plans and kernels of an actor that answers attention requests; outlives its incarnations."""

    def __init__(self, post: Post, plans: int) -> None:
        services = post.services
        self.device = services.device
        info = self.device.info
        self.arch = info.arch
        self.place = place_of(services)
        self.runs_kernels = info.runs_kernels
        self.accumulate = (services.options.mock or MockOptions()).dtype
        self.plans: PlanCache[AttentionPlan | BackwardPlan] = PlanCache(plans)
        compiles = info.runs_kernels or services.options.compile_on_mock
        self.kernels = KernelStore(post) if compiles else None
        self.decoding = Decoding(self.device, self.place, self.accumulate)

    def recall(self, request: FlashForward) -> Planned[AttentionPlan | BackwardPlan] | None:
        """The plan of a request as the caller gave it, if that is plain and has one. For any thread; raises nothing."""
        if not is_plain(request):
            return None
        try:
            return self.plans.peek(forward_signature(request, True))
        except Exception:
            return None  # as in `plan`, which comes next

    def plan(self, request: FlashForward, plain: bool) -> AttentionPlan | BackwardPlan:
        """The plan of an adopted request. plain: see `is_plain`."""
        try:
            key = (
                backward_signature(request, plain)
                if isinstance(request, FlashBackward)
                else forward_signature(request, plain)
            )
            plan = self.plans.find(key)
        except Exception:
            # An option that cannot be hashed or an operand that is no array: validation names it.
            return self._make_plan(request)
        if plan is None:
            plan = self._make_plan(request)
            self.plans.add(key, plan)
        return plan

    def _make_plan(self, request: FlashForward) -> AttentionPlan | BackwardPlan:
        try:
            if isinstance(request, FlashBackward):
                return backward_plan(request, self.arch, self.runs_kernels, self.accumulate)
            return forward_plan(request, self.device, self.accumulate)
        except GpuActorsError:
            raise
        except Exception as error:
            raise unreadable(request, error) from error

    def answer(self, actor: ServiceActor, call: Call[Any], request: FlashForward, plain: bool, finish: Finish) -> None:
        """Launch an adopted request, forward or backward, or park it until its kernels are compiled."""
        plan = self.plan(request, plain) if call.prepared is None else self.plans.use(call.prepared)
        kernels = plan.kernels
        if kernels is None:
            kernels = self._load(plan, call)
            if kernels is None:
                return
        try:
            launch = plan.bind(request, plain, kernels)
        except GpuActorsError:
            raise
        except Exception as error:
            raise unreadable(request, error) from error
        if call.begin_launch():
            actor.launch((call,), launch, finish)

    def _load(self, plan: AttentionPlan | BackwardPlan, call: Call[Any]) -> tuple[Kernel, ...] | None:
        """The kernels that the plan is bound to, none where the device runs none. None where the call was parked."""
        found: tuple[Kernel, ...] | None = ()
        if self.kernels is not None:
            found = self.kernels.get(plan.keys)
            if found is None:
                self.kernels.wait_for(plan.keys, call)
                return None
        plan.kernels = found if self.runs_kernels else ()
        return plan.kernels

    def decode_kernels(self, call: Call[Any], launching: CacheLaunch | None) -> tuple[Kernel, ...] | None:
        """The loaded kernels of a launch over a cache, none where the device runs none. None where the call was parked
        until they are compiled."""
        if self.kernels is None or launching is None:
            return ()
        kernels = self.kernels.get(launching.keys)
        if kernels is None:
            self.kernels.wait_for(launching.keys, call)
            return None
        return kernels if self.runs_kernels else ()


def place_of(services: Services) -> str:
    """Where operands may lie besides the host: "cpu" or "cuda:N"."""
    info = services.device.info
    return f"cuda:{info.index}" if info.kind == "cuda" else "cpu"


def unreadable(request: object, error: Exception) -> InvalidRequest:
    """What to answer a request with that raised ``error`` when it was looked at.

    Its arrays and options bring code of their own, which may raise anything. One program's strange argument must not
    cost every other program the actor.
    """
    kind = type(request).__name__
    logger.warning("a %s could not be read", kind, exc_info=error)
    # The traceback leads through the actor's frames to the call, and the call to this error.
    error.__traceback__ = None
    return InvalidRequest("message", kind, f"could not be read, it raised {error!r}")
