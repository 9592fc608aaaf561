"""The cells of a context whose actors run in another process, as its handles and its health see them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gpu_actors.clock import SYSTEM_CLOCK
from gpu_actors.devices.interface import DeviceInfo
from gpu_actors.errors import ActorStopped, ContextLost
from gpu_actors.isolation.records import Status
from gpu_actors.isolation.remote_queries import RemoteState
from gpu_actors.isolation.rpc_client import MakeError, RemoteMailbox, RpcClient
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.cell import Cell
from gpu_actors.runtime.children import Children
from gpu_actors.runtime.progress import Progress
from gpu_actors.runtime.timers import Timers
from gpu_actors.tracing import Trace
from gpu_actors.tracing.otel import otel_listener

__all__ = ["MakeLost", "RemoteCell", "RemoteChildren", "context_lost"]

MakeLost = Callable[[str, int, bool], ContextLost]
"""Makes the error for requests of a lost generation: message, generation, whether a worker had the request."""


def context_lost(message: str, generation: int, _: bool) -> ContextLost:
    return ContextLost(message, generation)


class RemoteCell(Cell):
    """The counterpart of `ActorCell` for another process: an actor's handle, its mailbox and its last known state."""

    mailbox: RemoteMailbox

    def __init__(self, actor_type: Any, environment: RemoteChildren, client: RpcClient) -> None:
        super().__init__(actor_type, environment, "running", functools.partial(RemoteMailbox, client=client))
        self.shared: RemoteState = RemoteState(self.name, client.query)
        # Counts nothing: the worker's context judges failures. ``succeeded_at`` is when any launch last succeeded.
        self.progress = Progress(environment.options.degraded_after, lambda: 0, _ignore)
        self._earlier_restarts = 0
        self._client = client

    def update(self, state: str, restarts: int) -> None:
        self.restarts = self._earlier_restarts + restarts
        if self._terminated is None:
            self.state = state
            if state in ("stopped", "failed"):
                self.terminate(ActorStopped(f"{self.name} has {state}") if state == "failed" else None)

    def begin_again(self) -> None:
        """Keep the restarts counted so far, because the next process counts from 0."""
        self._earlier_restarts = self.restarts
        self.mailbox.begin_again()


class RemoteChildren(Children):
    """The environment of an isolated context. ``lost`` stays None between generations: another process follows."""

    def __init__(
        self,
        info: DeviceInfo,
        options: ContextOptions,
        client: RpcClient,
        actors: tuple[Any, ...],
        make_lost: MakeLost = context_lost,
    ) -> None:
        spans = otel_listener()
        # The part of a device that an environment reads. The worker's context knows which kernels are barred.
        device: Any = SimpleNamespace(info=info, builds_kernels=False, barred=None)
        super().__init__(
            device=device,
            options=options,
            trace=Trace(() if spans is None else (spans,)),
            timers=Timers(SYSTEM_CLOCK),
            supervise=_ignore,
            carry_context=spans is not None,
        )
        self.make_lost: MakeLost = make_lost
        self.notes_caller = False  # no stream of a device crosses to the worker
        cells: dict[str, Any] = {}
        for actor_type in actors:
            cell = RemoteCell(actor_type, self, client)
            cells[cell.name] = cell
        self.cells = cells

    def update(self, status: Status) -> None:
        succeeded_at = time.monotonic() - status.success_age
        for name, counts in status.counts.items():
            cell: Any = self.cells[name]
            cell.progress.succeeded_at = succeeded_at
            cell.mailbox.update_counts(counts)
            cell.update(status.health.actors[name], status.restarts[name])

    def next_generation(self, cause: str) -> MakeError:
        """Leave the generation of a lost worker. Returns the function that makes an error for each of its requests."""
        generation = self.generation
        self.generation += 1
        self.trace.emit("context.lost", generation=generation, error=self.make_lost(cause, generation, True))
        for cell in self.cells.values():
            remote: Any = cell
            remote.begin_again()
        message = f"generation {generation} of the context is lost: {cause}"
        return functools.partial(self.make_lost, message, generation)


def _ignore(*_: object) -> None:
    return
