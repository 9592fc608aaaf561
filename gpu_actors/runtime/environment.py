"""Environment: the objects that a context's actors share, and the functions of the context that they call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gpu_actors.clock import Clock
from gpu_actors.devices.interface import Device
from gpu_actors.errors import ContextLost, DeadlineExceeded, GpuActorsError, InvalidRequest, LaunchError
from gpu_actors.fields import real
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.timers import Timers
from gpu_actors.tracing import Trace
from gpu_actors.tracing.work import caller

__all__ = ["ChildEvent", "Environment"]

ChildEvent: TypeAlias = Literal["ready", "failed", "stopped"]


@dataclass(eq=False)
class Environment(ABC):
    """Device, options, clock, timers and trace of one context, and the callbacks of its ContextActor.

    supervise: reports an event of a child's incarnation to the ContextActor. Its arguments are the child's cell, the
        incarnation's urn, the event, and the error if it failed. Never blocks. Safe to use from any thread.
    carry_context: whether calls carry their caller's OpenTelemetry context.
    lost: why the device context is lost, None while it is not.
    failure: why the context has failed, None while it has not.
    draining: whether the context is closing and accepts no more requests.
    compiler: the handle of the actor that compiles kernels, once the children are made.
    kernels: the `KernelStore` that the actors share. It knows which kernels are quarantined.
    on_failing: called when a vital actor has failed too often without a success, and at each failure after that.
    """

    device: Device
    options: ContextOptions
    trace: Trace
    timers: Timers
    supervise: Callable[[Any, str, ChildEvent, BaseException | None], None]
    carry_context: bool
    generation: int = 1
    lost: ContextLost | None = None
    failure: GpuActorsError | None = None
    draining: bool = False
    compiler: Any = None
    kernels: Any = None
    on_failing: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.clock: Clock = self.options.clock
        self.default_timeout: float | None = self.options.default_timeout
        self.notes_caller: bool = self.device.info.kind == "cuda"
        self.hang_timeout: float = self.options.hang_limit(self.device.info.kind)

    @abstractmethod
    def handle(self, actor_type: type) -> Any:
        """The handle of the child of that type. Raises KeyError for a type that is no child of this context."""

    @abstractmethod
    def context_lost(self, error: ContextLost) -> ContextLost:
        """Answer every unanswered call with `ContextLost`, and refuse later ones: the device context is lost.

        Runs on the thread that saw the loss, so that no answer waits for an actor. Only the first report counts.
        Returns the error to answer with in place of ``error``, which does not name the generation.
        """

    @property
    def compiles(self) -> bool:
        """Whether the kernels of requests are compiled: on a device that runs them, or if the options say so."""
        return self.device.info.runs_kernels or self.options.compile_on_mock

    @property
    def open(self) -> bool:
        """Whether requests are still accepted."""
        return self.lost is None and self.failure is None and not self.draining

    def note_caller(self) -> Any:
        """Return what a request's launch needs to know about the submitting thread. Raises `LaunchError`."""
        try:
            return self.device.note_caller()
        except Exception as error:
            # Without the note, the launch would not wait for the caller's stream and could read too early.
            raise LaunchError(f"the streams of the submitting thread cannot be told: {error!r}") from error

    def absolute_deadline(self, deadline: float | None, timeout: float | None) -> float:
        """The clock reading by which a call must be answered. Raises `InvalidRequest` and `DeadlineExceeded`."""
        if deadline is not None and timeout is not None:
            raise InvalidRequest("timeout", timeout, "give deadline or timeout, not both")
        now = self.clock.now()
        if deadline is not None:
            reading = real("deadline", deadline, "a finite number of monotonic seconds")
        else:
            seconds = self.default_timeout if timeout is None else timeout
            reading = now + real("timeout", seconds, "a finite number of seconds")
        if reading <= now:
            raise DeadlineExceeded("the deadline had passed when the request was made")
        return reading

    def trace_accepted(self, actor: str, call: Call[Any]) -> None:
        """Record a submission, with the label of the caller's work, and its OpenTelemetry context if calls carry it."""
        call.traced = True
        self.trace.emit(
            "request.accepted",
            actor=actor,
            request=call.number,
            message=type(call.message).__name__,
            **caller(self.carry_context),
        )
