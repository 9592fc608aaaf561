"""ActorCell: an actor's place in a context, with everything that stays when the actor is replaced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu_actors.devices.interface import Stream
from gpu_actors.errors import ActorFailed, ActorStopped, caused
from gpu_actors.options import ActorType
from gpu_actors.runtime.call import LAUNCHED, Call
from gpu_actors.runtime.completion import Completion
from gpu_actors.runtime.environment import Environment
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.progress import Progress
from gpu_actors.runtime.pykka_base import ActorRef

__all__ = ["ActorCell", "Cell", "Terminated"]

logger: logging.Logger = logging.getLogger("gpu_actors")


@dataclass(frozen=True, slots=True)
class Terminated:
    """Sent to the watchers of an actor once it has stopped (``error`` is None) or has failed for good."""

    label: str
    error: BaseException | None


class Cell:
    """An actor's place in a context, as its handle and its watchers see it. The actor may run in another process.

    Only the thread that supervises the actor writes ``state`` and ``restarts``.
    """

    def __init__(
        self,
        actor_type: type[ActorType],
        environment: Environment,
        state: str,
        make_mailbox: Callable[[str, int, int], Mailbox] = Mailbox,
    ) -> None:
        options = environment.options
        self.name: str = actor_type.label or actor_type.__name__
        service_type: Any = actor_type  # a ServiceActor, whose attributes ActorType does not declare
        self.actor_type: Any = actor_type
        self.environment = environment
        self.mailbox: Mailbox = make_mailbox(self.name, options.mailbox_capacity, options.max_in_flight)
        self.mailbox.on_traced = self._trace_answer
        self.handle: Any = service_type.handle_type(self)
        self.state: str = state
        self.restarts = 0
        self._lock = threading.Lock()
        self._watchers: list[Callable[[Terminated], None]] = []
        self._terminated: Terminated | None = None

    def takes_directly(self, message: object, prepared: Any = None) -> bool:
        """Whether the calling thread may do the actor's work on a message: if it is brief and the device allows it.

        prepared: see `Call`. If its ``brief`` is a bool, that replaces the answer of the actor's class.
        """
        return False

    def terminate(self, error: BaseException | None) -> None:
        """Tell the watchers that no further incarnation follows."""
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
                # It runs on the supervisor's thread, which every other actor still needs.
                logger.exception("a watcher of %s raised", self.name)

    def watch(self, callback: Callable[[Terminated], None]) -> None:
        with self._lock:
            if self._terminated is None:
                self._watchers.append(callback)
                return
        callback(self._terminated)

    def after_fork(self, reason: Callable[[], ActorStopped]) -> None:
        """Close this copy in a forked process, where no actor runs, and answer its calls."""
        self._lock = threading.Lock()
        self.mailbox.after_fork(reason)

    def _trace_answer(self, call: Call[Any]) -> None:
        trace = self.environment.trace
        if call.error is None:
            trace.emit("request.completed", actor=self.name, request=call.number)
        else:
            trace.emit("request.failed", actor=self.name, request=call.number, error=call.error)


class ActorCell(Cell):
    """Mailbox, stream, completion and state of one child of a ContextActor.

    ref: the reference of the current incarnation. Only the ContextActor's thread writes it.
    progress: counts the failures of the actor.
    busy_since: the clock's reading when the actor took its current batch of calls, None while it has none.
    stream: the actor's stream, None before the first launch (see `open_stream`).
    shared: the object that all incarnations share (see `ServiceActor.make_shared`).
    """

    def __init__(self, actor_type: type[ActorType], environment: Environment) -> None:
        super().__init__(actor_type, environment, "starting")
        self.progress: Progress = Progress(
            environment.options.degraded_after, lambda: self.mailbox.answered.get(None, 0), self._failing
        )
        self.completion: Completion = Completion(
            self.name,
            self.mailbox,
            environment.clock,
            environment.context_lost,
            self.progress,
            environment.device.bind_thread,
        )
        self.busy_since: float | None = None
        self.ref: ActorRef[Any] | None = None
        self.stream: Stream | None = None
        self.shared: Any = self.actor_type.make_shared(self)

    def open_stream(self) -> Stream:
        """The actor's stream. The first call opens it."""
        with self._lock:
            if self.stream is None:
                self.stream = self.environment.device.open_stream(self.name)
            return self.stream

    def takes_directly(self, message: object, prepared: Any = None) -> bool:
        if not self.environment.device.is_current():
            return False
        if prepared is not None and prepared.brief is not None:
            return bool(prepared.brief)
        try:
            return bool(self.actor_type.brief(message))
        except Exception:  # from the caller's objects or the actor's class: the actor's thread will answer with it
            return False

    # Used by the ContextActor

    def start(self) -> None:
        """Start an incarnation. It reports to the ContextActor."""
        self.ref = self.actor_type.start(self)

    def stop(self) -> None:
        """Ask the incarnation to stop after its current call. It reports to the ContextActor."""
        if self.ref is not None and self.ref.is_alive():
            self.ref.stop(block=False)

    def retire(self, failure: ActorFailed | None = None) -> None:
        """Refuse new calls, answer the open ones and tell the watchers, because no further incarnation follows.

        failure: the error that ended the last incarnation, None if it stopped without one.
        """
        text = f"{self.name} has stopped" if failure is None else str(failure)

        def reason() -> ActorStopped:
            return caused(ActorStopped(text), failure)

        if self.environment.lost is None:
            self.mailbox.close(reason)
        self.mailbox.fail_all(reason)
        self.terminate(failure)

    def after_fork(self, reason: Callable[[], ActorStopped]) -> None:
        super().after_fork(reason)
        after_fork = getattr(self.shared, "after_fork", None)
        if after_fork is not None:
            after_fork(reason)

    # Used by the actor

    def report_ready(self, urn: str) -> None:
        self.environment.supervise(self, urn, "ready", None)

    def report_stopped(self, urn: str) -> None:
        """Report that the incarnation has stopped. Calls that it held are queued again; those that it claimed fail."""
        for call in self._held():
            if call.state is LAUNCHED:
                call.fail(ActorStopped(f"{self.name} stopped while it held the request"))
            else:
                self.mailbox.requeue((call,))
        self.environment.supervise(self, urn, "stopped", None)

    def report_failure(self, urn: str, error: BaseException) -> None:
        """Report that ``error`` ended the incarnation. Answer the calls that it held with `ActorFailed` at once."""
        for call in self._held():
            call.fail(caused(ActorFailed(f"{self.name} failed while it held the request: {error!r}"), error))
        self.progress.crashed(error)
        self.environment.supervise(self, urn, "failed", error)

    def _failing(self) -> None:
        if self.actor_type.vital:
            self.environment.on_failing()

    def _held(self) -> list[Call[Any]]:
        self.mailbox.gather(0)
        return self.mailbox.held(self.completion.calls())
