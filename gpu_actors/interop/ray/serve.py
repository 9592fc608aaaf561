"""Contexts in Ray Serve: `ContextDeployment` in the replica, and `ask` in the program that calls it.

Errors travel as values. Serve would turn a replica's error into a mix of two types, whose text is a traceback and which
cannot be pickled. Methods marked with `as_value` therefore return an `Outcome`, and `ask` raises the error in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from ray import exceptions

from gpu_actors.context import open_context
from gpu_actors.distributed.pool import answered
from gpu_actors.errors import (
    ActorStopped,
    ContextLost,
    GpuActorsError,
    Overloaded,
    RequestCancelled,
    WorkerLost,
)
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.ray.channel import first_line
from gpu_actors.isolation.serialization import sendable_error
from gpu_actors.isolation.side_tasks import SideTasks
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.opening import start_thread

__all__ = ["ContextDeployment", "Outcome", "as_value", "ask"]

T = TypeVar("T")


class Outcome(NamedTuple):
    """The result of a method marked with `as_value`: a value, or the error that the method raised."""

    value: Any
    error: BaseException | None


def as_value(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Outcome]]:
    """Mark an ``async`` method of a deployment, so that its errors travel as values. Call it through `ask`."""

    @functools.wraps(method)
    async def answered(*arguments: Any, **options: Any) -> Outcome:
        try:
            return Outcome(await method(*arguments, **options), None)
        except Exception as error:
            return Outcome(None, sendable_error(error))

    return answered


class ContextDeployment:
    """The base of a deployment's class: each replica has a context of its own, as ``self.context``.

        @serve.deployment(ray_actor_options={"num_gpus": 1})
        class Attention(ContextDeployment):
            @as_value
            async def attend(self, q, k, v):
                return (await self.context.flash_attn.forward(q, k, v)).out

        handle = serve.run(Attention.bind("cuda:0"))
        out = await ask(handle.attend.remote(q, k, v), timeout=2.0)

    device, options, isolation: as for `open_context`. drain_timeout: seconds that an ending replica waits for launches.
    Serve waits for its requests before that, as long as ``graceful_shutdown_timeout_s`` allows.

    Serve replaces a replica whose context is failed, stopped or stalled. Set ``max_ongoing_requests`` to at most the
    options' ``mailbox_capacity``, so that requests wait in Serve's queue, which other replicas share.
    """

    def __init__(
        self,
        device: str = "auto",
        options: ContextOptions | None = None,
        *,
        isolation: Any = None,
        drain_timeout: float = 10.0,
    ) -> None:
        self._entered = contextlib.ExitStack()
        self._drain_timeout = drain_timeout
        self.context: GpuContext = self.enter(open_context(device, options, isolation=isolation))
        self._side_tasks = SideTasks(self.context)

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context manager that the replica needs, such as ``self.context.kv_cache(...)``, in ``__init__``. It
        is left when the replica ends."""
        return _in_a_thread(lambda: self._entered.enter_context(manager))

    async def run(self, function: Callable[..., Any], *arguments: Any, digests: Any = ()) -> Outcome:
        """Call ``function(context, *arguments)`` beside the context, as `RemoteContext.run` does. Call it by `ask`.

        digests: of the prompt's pages, by which `CacheAffineRouter` chooses the replica.
        """
        return await self._ran(function, *arguments)

    def check_health(self) -> None:
        """Raise `ContextLost` if the context is failed, stopped or stalled. Called by Serve.

        Serve replaces a replica for which this raises several times.
        """
        health = self.context.health()
        if health.state in ("failed", "stopped", "stalled"):
            raise ContextLost(f"the context has {health.state}: {health.reason}", health.generation)

    def __del__(self) -> None:
        """Drain and close the context. Called by Serve once the replica's requests have ended."""
        entered, self._entered = getattr(self, "_entered", None), contextlib.ExitStack()
        if entered is not None and hasattr(self, "context"):
            _in_a_thread(lambda: self._end(entered))

    @as_value
    async def _ran(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._side_tasks.run(function, arguments, _dropped))

    def _end(self, entered: contextlib.ExitStack) -> None:
        if hasattr(self, "_side_tasks"):
            self._side_tasks.close()
        with contextlib.suppress(GpuActorsError):
            self.context.drain(self._drain_timeout).result()
        entered.close()


async def ask(response: Awaitable[Any], *, timeout: float | None = None) -> Any:
    """Await a response of a deployment's handle: ``await ask(handle.attend.remote(q, k, v), timeout=2.0)``.

    Returns the value. Raises the error that the replica's method raised, and for errors of Serve itself:
    `Overloaded` if its queue is full; `WorkerLost`, ``happened`` "unknown", if the replica has died;
    `ActorStopped` if the deployment no longer exists; `RequestCancelled`.
    timeout: seconds, after which the request is cancelled and `DeadlineExceeded` raised. Cancelling the task cancels
    the request.
    """
    cancel = getattr(response, "cancel", lambda: None)
    try:
        outcome = await answered(response, cancel, timeout, f"the deployment has not answered within {timeout} s")
    except Exception as error:
        translated = _translated(error)
        if translated is None:
            raise
        raise translated from error
    if not isinstance(outcome, Outcome):
        return outcome
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _translated(error: Exception) -> GpuActorsError | None:
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

    said = first_line(error)
    if isinstance(error, BackPressureError):
        return Overloaded(str(error), error.retry_after_s or 1.0)
    if isinstance(error, RequestCancelledError | exceptions.TaskCancelledError):
        return RequestCancelled(said)
    if isinstance(error, DeploymentUnavailableError):
        return ActorStopped(said)
    if isinstance(error, exceptions.RayActorError):
        return WorkerLost(f"the replica is gone: {said}", 0, "replica", "unknown")
    return None


def _in_a_thread(function: Callable[[], T]) -> T:
    """Call a blocking function in a thread: Serve makes and ends a replica on the thread of its event loop."""
    return start_thread(function, "gpu-actors-replica").result()


def _dropped(_: Any, __: Any) -> None:
    return
