"""IsolatedContext: a `GpuContext` whose actors run in a process of their own."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.catching import undo_on_error
from gpu_actors.errors import DeadlineExceeded, GpuActorsError
from gpu_actors.handles.gpu_context import BUILT_IN, GpuContext, registered
from gpu_actors.handles.health import Health
from gpu_actors.isolation.cells import MakeLost, RemoteChildren, context_lost
from gpu_actors.isolation.generations import Generations
from gpu_actors.isolation.imports import refuse_opening
from gpu_actors.isolation.launcher import Launcher
from gpu_actors.isolation.processes import ChildProcess
from gpu_actors.isolation.records import Opened
from gpu_actors.isolation.rpc_client import RpcClient
from gpu_actors.isolation.serialization import check_options
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.reply import Reply

__all__ = ["IsolatedContext", "Started", "open_isolated", "start_isolated"]


class IsolatedContext(GpuContext):
    """A context in a child process. See docs/isolation.md."""

    def __init__(self, children: RemoteChildren, generations: Generations) -> None:
        super().__init__(children, generations)
        self._generations = generations

    @property
    def pid(self) -> int | None:
        """The id of the current process, None between two processes."""
        connection = self._generations.connection
        return None if connection is None else connection.pid

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        return self._generations.empty(shape, dtype)

    def health(self) -> Health:
        """The state of the context, as its process reported it at most a second ago.

        While the process is being replaced or does not answer, the state says so instead.
        """
        return _examine(self._generations, self._children, self._stopped)

    def _probe(self, timeout: float | None) -> Call[None]:
        limit = self._children.default_timeout if timeout is None else timeout
        return self._request("probe", limit, f"the probe was not answered within {limit} s")

    def after_fork(self) -> None:
        super().after_fork()
        self._generations.after_fork()

    def _drain(self, timeout: float | None, launches: bool) -> Reply[None]:
        local = super()._drain(timeout, launches)
        if not launches:
            return local
        drained = self._drained_by(None)

        def over(call: Call[None]) -> None:
            # A process that has ended has no launch that could still write.
            drained.settle(None, call.error if isinstance(call.error, DeadlineExceeded) else None, None)

        def then(call: Call[None]) -> None:
            if call.error is not None:
                drained.fail(call.error)
            elif self._generations.state != "ready":
                drained.resolve(None)  # no process has a launch that could still write
            else:
                remote = self._request("drain", timeout, f"not drained within {timeout} s")
                remote.when_done(over)

        local._call.when_done(then)
        return Reply(drained)

    def _request(self, name: str, timeout: float | None, late: str) -> Call[None]:
        call: Call[None] = self._generations.client.request_context((name,), timeout)
        self._limit(call, timeout, late)
        return call


class Started(NamedTuple):
    """A context whose first worker has opened it. obstacle: why "auto" is not CUDA in the worker, or None."""

    children: RemoteChildren
    generations: Generations
    obstacle: str | None


def start_isolated(
    device: str, options: ContextOptions, launcher: Launcher, make_lost: MakeLost = context_lost
) -> Started:
    """Open a context in a worker. Blocks.

    Raises what opening raises, `InvalidRequest` for options that cannot be sent, and `Unsupported` in the process of
    another context, if the module that opens this context is being imported there.
    """
    refuse_opening()
    worker_options = check_options(options)

    def make_children(opened: Opened, client: RpcClient) -> RemoteChildren:
        children = RemoteChildren(opened.info, options, client, (*BUILT_IN, *options.actors), make_lost)
        client.kernel_cell = children.cells["kernels"]
        return children

    generations = Generations(device, options, worker_options, make_children, launcher)
    try:
        generations.start()
    except RuntimeError as error:  # its thread cannot be started
        launcher.close()
        raise GpuActorsError(f"the context could not open: {error}") from error
    children, obstacle = generations.opened.result()
    return Started(children, generations, obstacle)


def open_isolated(device: str, options: ContextOptions) -> tuple[GpuContext, str | None]:
    """Open a context in its own process, as `start_isolated`. Returns it, and why "auto" is not CUDA there."""
    launcher = ChildProcess()
    with undo_on_error(launcher.arena.unmap):  # no request was made, so nothing lies in it
        children, generations, obstacle = start_isolated(device, options, launcher)
    return registered(IsolatedContext(children, generations)), obstacle


def _examine(generations: Generations, children: Any, stopped: bool) -> Health:
    actors = {name: cell.state for name, cell in children.cells.items()}
    now: dict[str, Any] = {"generation": children.generation, "actors": actors, "device": children.device.info}
    none_yet = Health("ready", True, "", oldest_launch=None, failures=dict.fromkeys(actors, 0), **now)
    last = none_yet if generations.health is None else generations.health

    def health(state: Any, ready: bool, reason: str) -> Health:
        return dataclasses.replace(last, state=state, ready=ready, reason=reason, **now)

    if children.lost is not None:
        return health("failed", False, str(children.lost))
    if stopped:
        failed = children.failure
        return health("stopped", False, "the context is closed" if failed is None else str(failed))
    if children.draining:
        return health("draining", False, "the context is draining")
    noun = generations.launcher.noun
    if generations.state != "ready":
        return health("degraded", False, f"the context's {noun} is being replaced: {generations.reason}")
    silent = generations.silence()
    if silent > generations.limit() / 2:
        return health("stalled", False, f"the context's {noun} has not answered for {silent:.1f} s")
    return health(last.state, last.ready, last.reason)
