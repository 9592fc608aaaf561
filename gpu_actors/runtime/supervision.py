"""Supervisor: decides what happens when a child fails.

Its models are Erlang/OTP's supervisor (restart strategies, intensity and period, escalation) and Akka's backoff. It has
no thread of its own: the ContextActor passes it reports and timers, so every decision is made on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gpu_actors.clock import Clock
from gpu_actors.options import RestartPolicy
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.pykka_base import Interrupted
from gpu_actors.tracing import Trace

__all__ = ["Supervisor"]


@dataclass(eq=False)
class Supervisor:
    """Restarts children by a policy, and escalates when they fail too often.

    call_later: runs a function on the supervisor's thread after a number of seconds.
    escalate: called with the cell and its error when the policy grants no further restart.
    """

    cells: Collection[ActorCell]
    policy: RestartPolicy
    clock: Clock
    trace: Trace
    call_later: Callable[[float, Callable[[], None]], object]
    escalate: Callable[[ActorCell, BaseException], None]
    stopping: bool = False
    _failures: dict[ActorCell | None, deque[float]] = field(init=False, default_factory=dict)
    _stop_requested: set[ActorCell] = field(init=False, default_factory=set)
    _due: set[ActorCell] = field(init=False, default_factory=set)
    _errors: dict[ActorCell, BaseException] = field(init=False, default_factory=dict)

    def start(self) -> None:
        for cell in self.cells:
            cell.start()

    def ready(self, cell: ActorCell, urn: str) -> None:
        """Note that a child's incarnation has opened."""
        if not self._current(cell, urn) or cell.state in ("stopped", "failed"):
            return
        restarted = cell.state == "restarting"
        cell.state = "running"
        if restarted:
            error = self._errors.pop(cell, None)
            self.trace.emit("actor.restarted", actor=cell.name, restarts=cell.restarts, error=error)

    def failed(self, cell: ActorCell, urn: str, error: BaseException) -> None:
        """Handle the failure of a child's incarnation: restart the child, restart all children, or escalate."""
        if not self._current(cell, urn):
            return
        if self.stopping or cell in self._stop_requested:
            self.stopped(cell, urn)
            return
        cell.ref = None
        # Vital actors share one allowance. Every other actor has its own.
        failures = self._failures.setdefault(None if cell.actor_type.vital else cell, deque())
        # If Ctrl-C interrupted the actor's work, a restart cannot repair the state that the work left.
        delay = None if isinstance(error, Interrupted) else self.policy.grant(failures, self.clock.now())
        if delay is None:
            self.trace.emit("actor.failed", actor=cell.name, error=error)
            self.escalate(cell, error)
            return
        siblings = [member for member in self.cells if member.state not in ("stopped", "failed")]
        group = siblings if self.policy.strategy == "all_for_one" else [cell]
        for member in group:
            member.state = "restarting"
            self._errors.setdefault(member, error)
            if member.ref is not None:
                self._stop_requested.add(member)
                member.stop()
        self.call_later(delay, lambda: self._restart(group))

    def stopped(self, cell: ActorCell, urn: str) -> None:
        """Handle the stop of a child's incarnation. If no stop was requested, the child has stopped for good."""
        if not self._current(cell, urn):
            return
        cell.ref = None
        requested = cell in self._stop_requested
        self._stop_requested.discard(cell)
        if self.stopping:
            cell.terminate(None)
        elif cell in self._due:
            self._replace(cell)
        elif not requested:
            cell.retire()

    def _restart(self, group: list[ActorCell]) -> None:
        for cell in group:
            if cell.ref is None:
                self._replace(cell)
            else:
                # The old incarnation still works on its last call. Two incarnations of one mailbox would overtake each
                # other.
                self._due.add(cell)

    def _replace(self, cell: ActorCell) -> None:
        self._due.discard(cell)
        if not self.stopping:
            cell.restarts += 1
            cell.start()

    def _current(self, cell: ActorCell, urn: str) -> bool:
        return cell.ref is not None and cell.ref.actor_urn == urn
