"""RemoteContext: a `GpuContext` in a worker, with functions that run beside it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, cast, overload

from gpu_actors.context import open_context
from gpu_actors.errors import ActorStopped, InvalidRequest, WorkerLost
from gpu_actors.fields import expect, real
from gpu_actors.handles.gpu_context import GpuContext, registered
from gpu_actors.handles.kv_cache import KvCache
from gpu_actors.isolation.cells import RemoteChildren
from gpu_actors.isolation.context import IsolatedContext, start_isolated
from gpu_actors.isolation.generations import Generations
from gpu_actors.isolation.launcher import Launcher
from gpu_actors.isolation.processes import ChildProcess
from gpu_actors.isolation.rpc_client import RemoteMailbox
from gpu_actors.isolation.side_tasks import CacheRef
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.reply import Reply
from gpu_actors.values import show

__all__ = ["RemoteContext", "open_remote"]

T = TypeVar("T")

_WORKERS = itertools.count(1)


class RemoteContext(IsolatedContext):
    """A context in a worker. Made by `open_remote`; safe to share between event loops and threads.

    It has the handles, replies and errors of any context. Requests on one worker reach it in the order in which they
    are made, each once, even if its channel reorders or repeats records. A worker that ends is followed by the next
    generation, as its `RestartPolicy` allows. The lost worker's requests are answered with `WorkerLost`. Requests with
    its caches, sequences and kernels raise `StaleBuffer`.

    name: the worker's name in errors.
    """

    def __init__(self, children: RemoteChildren, generations: Generations, name: str) -> None:
        super().__init__(children, generations)
        self.name: str = name
        capacity = children.options.mailbox_capacity
        self._runs: RemoteMailbox = RemoteMailbox("", capacity, capacity, generations.client)

    def __repr__(self) -> str:
        return f"<RemoteContext {self.name!r} on {self.info.name}, generation {self.generation}, {self.health().state}>"

    @overload
    def run(
        self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, timeout: float | None = None
    ) -> Reply[T]: ...

    @overload
    def run(self, function: Callable[..., T], *arguments: Any, timeout: float | None = None) -> Reply[T]: ...

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Reply[Any]:
        """Call ``function(context, *arguments)`` in the worker, beside its context. The reply returns its result.

        So many requests can cost one round trip. A coroutine function runs on a loop of the worker, where it may await
        replies. Another function runs in a thread, at most 32 at the same time, where it may call ``reply.result()``.

        function: from a module that the worker can import. arguments: any objects that can be pickled. Arrays go
        through shared memory. A `KvCache` of this context becomes the worker's own handle of it.
        timeout: seconds (None: ``default_timeout``) after which the reply raises `DeadlineExceeded`.

        The reply raises what the function raises, `InvalidRequest` for an argument that cannot cross, `WorkerLost`, and
        `RequestCancelled`. Cancelling it cancels a coroutine at its next await, another function only before it begins.
        """
        call: Call[Any] = Call(None, self._runs)
        try:
            expect(callable(function), "function", show(function), "must be callable, as function(context, ...)")
            limit = self._children.default_timeout
            if timeout is not None:
                limit = real("timeout", timeout, "a finite number of seconds, or None")
            call.message = "run", function, tuple(self._serializable(argument) for argument in arguments)
        except InvalidRequest as error:
            self._runs.refuse(call, error)
            return Reply(call)
        if limit is not None:
            call.deadline = time.monotonic() + limit
        self._limit(call, limit, f"the function did not end within {limit} s")
        self._runs.put(call)
        return Reply(call)

    def after_fork(self) -> None:
        super().after_fork()
        stayed_behind = str(self._children.failure)
        self._runs.after_fork(lambda: ActorStopped(stayed_behind))

    def _serializable(self, argument: Any) -> Any:
        if not isinstance(argument, KvCache):
            return argument
        reason = "must be a cache of this context, and entered"
        expect(argument._children is self._children and argument._number > 0, "arguments", argument, reason)
        stale = argument._stale()
        if stale is not None:
            raise InvalidRequest("arguments", argument, str(stale))
        return CacheRef(argument._number, argument._generation, argument._spec)

    def _drain(self, timeout: float | None, launches: bool) -> Reply[None]:
        """Wait for functions first, because they may make requests."""
        self._children.draining = True
        self._runs.close(_draining)
        began = time.monotonic()

        def then() -> None:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
            rest = super(RemoteContext, self)._drain(left, launches)
            rest._call.when_done(over)

        def over(call: Call[None]) -> None:
            drained.settle(None, call.error, None)

        drained = self._drained_by(timeout)
        self._runs.when_idle(then, launches=False)
        return Reply(drained)


def _draining() -> ActorStopped:
    return ActorStopped("the context is draining")


class open_remote(open_context):
    """Open a context in a worker, in the ways of `open_context`: ``async with open_remote(...) as ctx``.

    device: as for `open_context`, in the worker.
    options: only those that can be sent to the worker. ``restart`` is the policy for workers that end.
    workplace: starts the worker; None starts a child process. See `ChildProcess` and `InProcess`. Each context needs
        a workplace of its own.
    name: the worker's name in errors; None: "worker 1" and so on.

    Entering raises what `open_context` raises.
    """

    def __init__(
        self,
        device: str = "auto",
        options: ContextOptions | None = None,
        *,
        workplace: Launcher | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(device, options, isolation="process")
        self._launcher: Launcher = ChildProcess() if workplace is None else workplace
        self._name = f"worker {next(_WORKERS)}" if name is None else name

    async def __aenter__(self) -> RemoteContext:
        return cast("RemoteContext", await super().__aenter__())

    def __await__(self) -> Generator[Any, None, RemoteContext]:
        return cast("RemoteContext", (yield from super().__await__()))

    def __enter__(self) -> RemoteContext:
        return cast("RemoteContext", super().__enter__())

    def _open(self) -> GpuContext:
        name = self._name

        def make_lost(message: str, generation: int, sent: bool) -> WorkerLost:
            return WorkerLost(f"{name}: {message}", generation, name, "unknown" if sent else "no")

        children, generations, self._obstacle = start_isolated(self._device, self._options, self._launcher, make_lost)
        return registered(RemoteContext(children, generations, name))
