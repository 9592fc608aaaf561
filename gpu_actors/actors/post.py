"""Post: the place in a context that an actor fills, and what stays there when the actor is replaced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_actors.actors.call import LAUNCHED, Call
from gpu_actors.actors.completion import Completion
from gpu_actors.actors.mailbox import Mailbox
from gpu_actors.devices.interface import Stream
from gpu_actors.errors import ActorFailed, ActorStopped, ContextLost

if TYPE_CHECKING:
    import pykka

    from gpu_actors.actors.base import ServiceActor
    from gpu_actors.actors.services import Services

__all__ = ["ChildFailed", "ChildReady", "ChildStopped", "Post", "Terminated"]

logger = logging.getLogger("gpu_actors")


@dataclass(frozen=True, slots=True)
class Terminated:
    """Sent to whoever watches an actor, once it has stopped (error None) or failed for good."""

    label: str
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class ChildReady:
    post: Post
    urn: str


@dataclass(frozen=True, slots=True)
class ChildFailed:
    post: Post
    urn: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ChildStopped:
    post: Post
    urn: str


class Post:
    """Mailbox, stream, completion and state of one child of a ContextActor.

    ``state``, ``restarts`` and ``ref`` are written by the ContextActor's thread alone. ``busy_since`` is the clock's
    reading when the actor took what it is working on, None while it is not. ``kept`` is whatever the actor type wants
    to find again after a restart (see `ServiceActor.keep`).
    """

    def __init__(self, actor_type: type[ServiceActor], services: Services) -> None:
        options = services.options
        self.name = actor_type.label or actor_type.__name__
        self.actor_type = actor_type
        self.services = services
        self.mailbox = Mailbox(self.name, options.mailbox_capacity, options.max_in_flight)
        self.mailbox.on_traced = self._trace_answer
        self.completion = Completion(self.name, self.mailbox, services.clock, self.report_lost)
        self.handle = actor_type.handle_type(self)
        self.state = "starting"
        self.restarts = 0
        self.busy_since: float | None = None
        self.ref: pykka.ActorRef[Any] | None = None
        self._stream: Stream | None = None
        self._lock = threading.Lock()
        self._watchers: list[Callable[[Terminated], None]] = []
        self._terminated: Terminated | None = None
        self.kept: Any = actor_type.keep(self)

    @property
    def stream(self) -> Stream:
        """The actor's stream, opened at its first launch."""
        stream = self._stream
        if stream is None:
            with self._lock:
                if self._stream is None:
                    self._stream = self.services.device.open_stream(self.name)
                stream = self._stream
        return stream

    # Used by the ContextActor

    def start(self) -> None:
        """Start an incarnation; `ChildReady` or `ChildFailed` follows."""
        self.ref = self.actor_type.start(self)

    def stop(self) -> None:
        """Ask the incarnation to stop after the call that it is working on; `ChildStopped` follows."""
        if self.ref is not None and self.ref.is_alive():
            self.ref.stop(block=False)

    def terminate(self, error: BaseException | None) -> None:
        """No incarnation will follow: tell the watchers."""
        with self._lock:
            if self._terminated is not None:
                return
            self.state = "stopped" if error is None else "failed"
            self._terminated = Terminated(self.name, error)
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            try:
                watcher(self._terminated)
            except BaseException:
                # It runs on the supervisor's thread, which everybody else still needs.
                logger.exception("a watcher of %s raised", self.name)

    def retire(self) -> None:
        """The incarnation has stopped of itself: refuse calls, answer those that wait, tell the watchers."""

        def reason() -> ActorStopped:
            return ActorStopped(f"{self.name} has stopped")

        if self.services.lost is None:
            self.mailbox.close(reason)
        self.mailbox.fail_all(reason)
        self.terminate(None)

    def watch(self, callback: Callable[[Terminated], None]) -> None:
        with self._lock:
            if self._terminated is None:
                self._watchers.append(callback)
                return
        callback(self._terminated)

    def after_fork(self, reason: Callable[[], ActorStopped]) -> None:
        """Close the child process's copy, which has no actor, and answer its calls."""
        self._lock = threading.Lock()
        self.mailbox.after_fork(reason)
        forked = getattr(self.kept, "after_fork", None)
        if forked is not None:
            forked(reason)

    # Used by the actor

    def report_ready(self, actor: ServiceActor) -> None:
        self.services.supervise(ChildReady(self, actor.actor_urn))

    def report_stopped(self, actor: ServiceActor) -> None:
        """An incarnation has stopped. Calls that only it knew go back in the queue; what it had claimed cannot."""
        for call in self._held():
            if call.state is LAUNCHED:
                call.fail(ActorStopped(f"{self.name} stopped while it held the request"))
            else:
                self.mailbox.give_back((call,))
        self.services.supervise(ChildStopped(self, actor.actor_urn))

    def report_failure(self, actor: ServiceActor, error: BaseException) -> None:
        """An incarnation is dying of ``error``. Calls that only it knew are answered here and now."""
        for call in self._held():
            call.fail(_died(self.name, error))
        self.services.supervise(ChildFailed(self, actor.actor_urn, error))

    def report_lost(self, error: ContextLost) -> ContextLost:
        """Gives what to answer with instead."""
        return self.services.context_lost(error)

    def park(self, call: Call[Any]) -> None:
        """Take the call out of this incarnation's hands: something that outlives it will answer it or give it back."""
        self.mailbox.park(call)

    def _held(self) -> list[Call[Any]]:
        self.mailbox.gather(0)
        return self.mailbox.held(self.completion.calls())

    def _trace_answer(self, call: Call[Any]) -> None:
        trace = self.services.trace
        if call.error is None:
            trace.emit("request.completed", actor=self.name, request=call.number)
        else:
            trace.emit("request.failed", actor=self.name, request=call.number, error=call.error)


def _died(name: str, error: BaseException) -> ActorFailed:
    failure = ActorFailed(f"{name} failed while it held the request: {error!r}")
    failure.__cause__ = error
    return failure
