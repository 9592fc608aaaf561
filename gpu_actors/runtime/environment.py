"""Environment: what a context's actors share, and what they may ask of the context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from gpu_actors.clock import Clock
from gpu_actors.devices.interface import Device
from gpu_actors.errors import ContextLost, GpuActorsError, InvalidRequest
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.timers import Timers
from gpu_actors.tracing import Trace
from gpu_actors.tracing.otel import current_context
from gpu_actors.validation.fields import real

__all__ = ["Environment"]


class Environment(ABC):
    """Device, options, clock, timers and trace of one context, and the ways back to its ContextActor.

    supervise: hands a child's report to the ContextActor. Never blocks; safe from any thread.
    compiler: the handle of the actor that compiles kernels, once the children are made.
    on_failing: called when a vital actor has failed too often without a success, and at each failure after that.
    """

    def __init__(
        self,
        device: Device,
        options: ContextOptions,
        trace: Trace,
        timers: Timers,
        supervise: Callable[[Any], None],
        carry_context: bool,
    ) -> None:
        self.device = device
        self.options = options
        self.clock: Clock = options.clock
        self.timers = timers
        self.trace = trace
        self.supervise = supervise
        self.default_timeout: float | None = options.default_timeout
        self.notes_caller: bool = device.info.kind == "cuda"
        self.generation = 1
        self.lost: ContextLost | None = None
        self.failure: GpuActorsError | None = None
        self.draining = False
        self.hang_timeout: float = options.hang_limit(device.info.kind)
        self.compiler: Any = None
        self.on_failing: Callable[[], object] = lambda: None
        self._carry_context = carry_context

    @abstractmethod
    def handle(self, actor_type: type) -> Any:
        """The handle of the child of that type. Raises KeyError for a type that is no child of this context."""

    @abstractmethod
    def context_lost(self, error: ContextLost) -> ContextLost:
        """The device context is gone: answer everything unanswered with `ContextLost`, refuse what comes later.

        Runs on the thread that saw it, so that no answer waits for an actor. Only the first report counts.
        Gives what to answer with where ``error`` would have been the answer: that does not know the generation.
        """

    @property
    def compiles(self) -> bool:
        """Whether the kernels of requests are compiled: on every device that runs them, elsewhere where asked for."""
        return self.device.info.runs_kernels or self.options.compile_on_mock

    @property
    def open(self) -> bool:
        """Whether requests are still taken in."""
        return self.lost is None and self.failure is None and not self.draining

    def absolute_deadline(self, deadline: float | None, timeout: float | None) -> float:
        """The clock reading by which a call must be answered. Raises `InvalidRequest`."""
        if deadline is not None:
            if timeout is not None:
                raise InvalidRequest("timeout", timeout, "give deadline or timeout, not both")
            return real("deadline", deadline, "a finite number of monotonic seconds")
        if timeout is None:
            assert self.default_timeout is not None
            timeout = self.default_timeout
        return self.clock.now() + real("timeout", timeout, "a finite number of seconds")

    def trace_accepted(self, actor: str, call: Call[Any]) -> None:
        """Record a submission, with the caller's OpenTelemetry context where spans are made."""
        call.traced = True
        context = current_context() if self._carry_context else None
        self.trace.emit(
            "request.accepted",
            actor=actor,
            request=call.number,
            message=type(call.message).__name__,
            context=context,
        )
