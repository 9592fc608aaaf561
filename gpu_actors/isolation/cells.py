"""The cells of a context whose actors run in another process, as handles and health look at them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from gpu_actors.clock import SYSTEM_CLOCK
from gpu_actors.devices.interface import DeviceInfo
from gpu_actors.errors import ActorStopped, ContextLost
from gpu_actors.isolation.questions import Questions
from gpu_actors.isolation.records import Report
from gpu_actors.isolation.relay import Relay, RelayMailbox
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.cell import Terminated
from gpu_actors.runtime.children import Children
from gpu_actors.runtime.timers import Timers
from gpu_actors.tracing import Trace
from gpu_actors.tracing.otel import otel_listener

__all__ = ["RemoteCell", "RemoteChildren"]


class RemoteCell:
    """What `ActorCell` is for an actor of this process: its handle, its account and its state when it was last seen."""

    def __init__(self, actor_type: Any, environment: RemoteChildren, relay: Relay) -> None:
        options = environment.options
        self.name: str = actor_type.label or actor_type.__name__
        self.actor_type = actor_type
        self.environment = environment
        self.mailbox: RelayMailbox = RelayMailbox(self.name, options.mailbox_capacity, options.max_in_flight, relay)
        self.mailbox.on_traced = self._trace_answer
        self.shared: Questions = Questions(self.name, relay.ask)
        self.handle: Any = actor_type.handle_type(self)
        self.state: str = "running"
        self.restarts = 0
        self._earlier_restarts = 0
        self._relay = relay
        self._lock = threading.Lock()
        self._watchers: list[Callable[[Terminated], None]] = []
        self._terminated: Terminated | None = None

    def open_stream(self) -> Any:
        """What stands for the actor's stream: it knows what was recorded there."""
        return _Recordings(functools.partial(self._relay.ask, "recording_stats", self.name))

    def seen(self, state: str, restarts: int) -> None:
        """The actor's state in its process now."""
        self.restarts = self._earlier_restarts + restarts
        if self._terminated is None:
            self.state = state
            if state in ("stopped", "failed"):
                self.terminate(ActorStopped(f"{self.name} has {state}") if state == "failed" else None)

    def begin_again(self) -> None:
        """Another process follows."""
        self._earlier_restarts = self.restarts
        self.mailbox.begin_again()

    def terminate(self, error: BaseException | None) -> None:
        """Nothing will follow: tell the watchers."""
        with self._lock:
            if self._terminated is not None:
                return
            self.state = "stopped" if error is None else "failed"
            self._terminated = Terminated(self.name, error)
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(self._terminated)

    def watch(self, callback: Callable[[Terminated], None]) -> None:
        with self._lock:
            if self._terminated is None:
                self._watchers.append(callback)
                return
        callback(self._terminated)

    def after_fork(self, reason: Callable[[], ActorStopped]) -> None:
        self._lock = threading.Lock()
        self.mailbox.after_fork(reason)

    def _trace_answer(self, call: Any) -> None:
        trace = self.environment.trace
        if call.error is None:
            trace.emit("request.completed", actor=self.name, request=call.number)
        else:
            trace.emit("request.failed", actor=self.name, request=call.number, error=call.error)


class RemoteChildren(Children):
    """The environment of an isolated context. ``lost`` is None between two generations: another process follows."""

    def __init__(self, info: DeviceInfo, options: ContextOptions, relay: Relay, actors: tuple[Any, ...]) -> None:
        spans = otel_listener()
        device: Any = _RemoteDevice(info)
        super().__init__(
            device=device,
            options=options,
            trace=Trace(() if spans is None else (spans,)),
            timers=Timers(SYSTEM_CLOCK),
            supervise=_ignore,
            carry_context=spans is not None,
        )
        self.notes_caller = False  # no stream of a device is handed over
        cells: dict[str, Any] = {}
        for actor_type in actors:
            cell = RemoteCell(actor_type, self, relay)
            cells[cell.name] = cell
        self.cells = cells

    def seen(self, report: Report) -> None:
        """Book how the actors are."""
        for name, counts in report.counts.items():
            cell: Any = self.cells[name]
            cell.mailbox.there(counts)
            cell.seen(report.health.actors[name], report.restarts[name])

    def next_generation(self, cause: str) -> Callable[[], ContextLost]:
        """The process is lost. Gives what makes the error of each request that it had."""
        generation = self.generation
        self.generation += 1
        self.trace.emit("context.lost", generation=generation, error=ContextLost(cause, generation))
        for cell in self.cells.values():
            there: Any = cell
            there.begin_again()
        return functools.partial(_lost, generation, cause)


class _RemoteDevice:
    """What an environment asks of a device that lies in another process."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.builds_kernels = False


class _Recordings:
    def __init__(self, ask: Callable[[], Any]) -> None:
        self.recording_stats = ask


def _lost(generation: int, cause: str) -> ContextLost:
    return ContextLost(f"generation {generation} of the context is lost: {cause}", generation)


def _ignore(_: Any) -> None:
    return
