"""SideTasks: functions of the program that run in the worker, beside its context."""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_actors.actors.kv_cache import KvCacheActor
from gpu_actors.errors import GpuActorsError, RequestCancelled
from gpu_actors.handles.kv_cache import KvCache
from gpu_actors.kv.requests import KvCacheSpec

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["CacheRef", "SideTasks"]

# How many plain functions run at the same time. Coroutines share one loop, and their number has no bound.
_THREADS = 32

OnDone = Callable[[Any, "BaseException | None"], None]


class CacheRef(NamedTuple):
    """Stands for a `KvCache` of the context among the arguments of a function."""

    number: int
    generation: int
    spec: KvCacheSpec


class SideTasks:
    """Runs functions with the context as first argument: coroutines on a loop of its own, others in threads."""

    def __init__(self, context: GpuContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = ThreadPoolExecutor(_THREADS, "gpu-actors-beside")

    def run(self, function: Any, arguments: tuple[Any, ...], on_done: OnDone) -> Future[Any]:
        """Start a function. Its future can cancel it: a coroutine at any time, another function before it begins.

        on_done: called once, with the result or the error, on any thread.
        """
        operands = [self._cache(one) if isinstance(one, CacheRef) else one for one in arguments]
        future: Future[Any]
        if _is_coroutine(function):
            coroutine = _run_coroutine(function, self._context, operands)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        else:
            future = self._threads.submit(_run_function, function, self._context, operands)
        future.add_done_callback(lambda done: on_done(*_outcome(done)))
        return future

    def close(self) -> None:
        """Cancel the running functions, as far as possible."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _cache(self, ref: CacheRef) -> KvCache:
        children = self._context._children
        return KvCache.at(children, children.handle(KvCacheActor), ref.spec, ref.number, ref.generation)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="gpu-actors-beside", daemon=True).start()
            return self._loop


def _is_coroutine(function: Any) -> bool:
    while hasattr(function, "func"):  # of functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _run_coroutine(function: Any, context: Any, arguments: list[Any]) -> Any:
    try:
        return await function(context, *arguments)
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
        raise GpuActorsError(f"the function raised {error!r}") from None


def _run_function(function: Any, context: Any, arguments: list[Any]) -> Any:
    try:
        return function(context, *arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        raise GpuActorsError(f"the function raised {error!r}") from None


def _outcome(done: Future[Any]) -> tuple[Any, BaseException | None]:
    if done.cancelled():
        return None, RequestCancelled("cancelled where it ran")
    error = done.exception()
    if error is None:
        return done.result(), None
    if not isinstance(error, GpuActorsError):
        # The frames stay in the worker, so their text goes along.
        error.add_note("in the worker:\n" + "".join(traceback.format_exception(error)).rstrip())
    return None, error


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop):  # cancels the tasks that are left
        loop.run_forever()
