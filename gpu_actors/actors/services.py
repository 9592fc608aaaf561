"""Services: what a ContextActor shares with its children."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpu_actors.clock import Clock
from gpu_actors.devices.interface import Device
from gpu_actors.errors import ContextLost, GpuActorsError, InvalidRequest
from gpu_actors.options import ContextOptions
from gpu_actors.timers import Timers
from gpu_actors.tracing import Trace
from gpu_actors.tracing.otel import current_context
from gpu_actors.validation.fields import real

if TYPE_CHECKING:
    from gpu_actors.actors.base import ServiceActor
    from gpu_actors.actors.call import Call
    from gpu_actors.actors.handle import ActorHandle
    from gpu_actors.actors.post import Post

__all__ = ["Services"]


class Services:
    """Device, options, clock, timers and trace of one context, and the ways back to its ContextActor.

    supervise: hands a child's report to the ContextActor. Never blocks; safe from any thread.
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
        self.default_timeout = options.default_timeout
        self.notes_caller = device.info.kind == "cuda"
        self.generation = 1
        self.lost: ContextLost | None = None
        self.failure: GpuActorsError | None = None
        self.draining = False
        self.hang_timeout = options.hang_limit(device.info.kind)
        self.posts: dict[str, Post] = {}
        self._carry_context = carry_context
        self._lock = threading.Lock()

    def handle(self, actor_type: type[ServiceActor]) -> ActorHandle:
        """The handle of the child of that type. Raises KeyError for a type that is no child of this context."""
        for post in self.posts.values():
            if post.actor_type is actor_type:
                return post.handle
        raise KeyError(f"{actor_type.__name__} is not an actor of this context; name it in ContextOptions(actors=...)")

    def oldest_launch(self) -> float | None:
        """Clock reading at which the oldest unfinished launch of the context began, None where there is none."""
        ages = [since for post in self.posts.values() if (since := post.completion.oldest()) is not None]
        return min(ages, default=None)

    def stuck(self) -> list[str]:
        """The actors that have been at the same requests for half the hang timeout."""
        since = self.clock.now() - self.hang_timeout / 2
        return [name for name, post in self.posts.items() if (began := post.busy_since) is not None and began < since]

    def times_out(self, message: Any) -> bool:
        """Whether a message that came without a time limit gets the default one.

        Not one whose type has ``endless`` set: somebody else's time limit, or nobody's patience, hangs on its answer.
        """
        return self.default_timeout is not None and not getattr(type(message), "endless", False)

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

    def trace_accepted(self, post: Post, call: Call[Any]) -> None:
        """Record a submission, with the caller's OpenTelemetry context where spans are made."""
        call.traced = True
        context = current_context() if self._carry_context else None
        self.trace.emit(
            "request.accepted",
            actor=post.name,
            request=call.number,
            message=type(call.message).__name__,
            context=context,
        )

    def context_lost(self, error: ContextLost) -> ContextLost:
        """The device context is gone: answer everything unanswered with `ContextLost`, refuse what comes later.

        Runs on the thread that saw it, so that nobody waits for an actor to get to it. Only the first report counts.
        Gives what to answer with where ``error`` would have been the answer: that does not know the generation.
        """
        with self._lock:
            first = self.lost is None
            if first:
                self.lost = error
                self.generation += 1
        generation, cause = self.generation - 1, self.lost

        def reason() -> ContextLost:
            lost = ContextLost(f"generation {generation} of the context is lost: {cause}", generation)
            lost.__cause__ = cause
            return lost

        if first:
            self.trace.emit("context.lost", generation=generation, error=error)
            for post in self.posts.values():
                post.mailbox.close(reason)
            for post in self.posts.values():
                post.mailbox.fail_all(reason)
                post.mailbox.write_off()
        return reason()
