"""FaultPlan: which faults to inject, and at which launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.errors import ContextLost, GpuActorsError, InvalidRequest, LaunchError
from gpu_actors.fields import real

__all__ = ["Fault", "FaultPlan"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule of a plan.

    kind: what happens.
    launch: the number of the launch, None for every launch.
    key: the key whose launches are counted, None for any.
    seconds: the length of a delay.
    error: the error of a failure.
    kernel: the name of the kernel whose launches are counted, None for any.
    value: replaces one element of each output; None: one bit of that element is flipped.
    """

    kind: Literal["fail", "delay", "hang", "lose_context", "wrong"]
    launch: int | None
    key: DispatchKey | None
    seconds: float = 0.0
    error: GpuActorsError | type[GpuActorsError] | None = None
    kernel: str | None = None
    value: float | None = None

    def hits(self, key: DispatchKey | None, kernels: Collection[str]) -> bool:
        """Whether a launch of that key and of these kernels is counted for this rule."""
        return self.key in (None, key) and (self.kernel is None or self.kernel in kernels)

    def make_error(self) -> GpuActorsError:
        """The error that the launch ends with."""
        if self.kind == "lose_context":
            return ContextLost("the context was lost by a fault plan")
        if self.error is None:
            return LaunchError("a fault plan failed the launch")
        if isinstance(self.error, type):
            return self.error("a fault plan failed the launch")
        return self.error


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults for ``ContextOptions(fault_plan=...)``, on any device. A plan is frozen: each method returns a longer one.

    ``launch`` is the number of a launch; None means every launch. Launches are counted from 1 over the whole context,
    and launches that prove a kernel count too. ``key`` limits a fault to launches of one `DispatchKey`, and ``kernel``
    to launches with a kernel of that name. Then only those launches are counted.

        plan = FaultPlan().delay(0.01).fail(launch=3).lose_context(launch=10)
    """

    faults: tuple[Fault, ...] = ()

    def fail(
        self,
        launch: int | None = None,
        error: GpuActorsError | type[GpuActorsError] | None = None,
        key: DispatchKey | None = None,
    ) -> FaultPlan:
        """End the launch with ``error`` (default `LaunchError`). The context survives.

        error: an instance, or a type that can be made from a message alone.
        """
        return self._with(Fault("fail", launch, key, error=error))

    def delay(self, seconds: float, launch: int | None = None, key: DispatchKey | None = None) -> FaultPlan:
        """End the launch ``seconds`` later. Several delays of one launch add up."""
        if real("seconds", seconds, "a finite number of seconds, >= 0") < 0:
            raise InvalidRequest("seconds", seconds, "must be a finite number of seconds, >= 0")
        return self._with(Fault("delay", launch, key, seconds=seconds))

    def hang(self, launch: int | None = None, key: DispatchKey | None = None, kernel: str | None = None) -> FaultPlan:
        """Never end the launch. Later launches on its stream are settled after it, so they give no result either."""
        return self._with(Fault("hang", launch, key, kernel=kernel))

    def lose_context(
        self, launch: int | None = None, key: DispatchKey | None = None, kernel: str | None = None
    ) -> FaultPlan:
        """End the launch and every later one with `ContextLost`."""
        return self._with(Fault("lose_context", launch, key, kernel=kernel))

    def wrong(
        self, kernel: str, launch: int | None = None, key: DispatchKey | None = None, value: float | None = None
    ) -> FaultPlan:
        """Make the launch write wrong numbers: one element of each array that it writes on the host is changed.

        kernel: the kernel's name, such as "forward_mma". value: replaces the element; by default the second-highest bit
        of the element is flipped, for a float the highest bit of its exponent.
        """
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidRequest("value", value, "must be a number, NaN too, or None")
        return self._with(Fault("wrong", launch, key, kernel=kernel, value=value))

    def _with(self, fault: Fault) -> FaultPlan:
        if fault.launch is not None and (type(fault.launch) is not int or fault.launch < 1):
            raise InvalidRequest("launch", fault.launch, "must be an int >= 1 (launches count from 1), or None")
        if fault.key is not None and not isinstance(fault.key, DispatchKey):
            raise InvalidRequest("key", fault.key, "must be a DispatchKey, as inspect_key gives, or None")
        if fault.kernel is not None and (not isinstance(fault.kernel, str) or not fault.kernel):
            raise InvalidRequest("kernel", fault.kernel, "must be the name of a kernel, or None")
        _check_error(fault)
        return dataclasses.replace(self, faults=(*self.faults, fault))


def _check_error(fault: Fault) -> None:
    try:
        error: object = fault.make_error()
    except TypeError:  # the type needs more than a message
        error = None
    if not isinstance(error, GpuActorsError):
        reason = "must be a GpuActorsError, or a type of one that can be made from a message alone"
        raise InvalidRequest("error", fault.error, reason)
