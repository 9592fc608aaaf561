"""ContextPool: several contexts as one service."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

from gpu_actors.catching import undo_on_error
from gpu_actors.distributed.member import Member
from gpu_actors.distributed.pooled_cache import PooledKvCache
from gpu_actors.distributed.remote.context import RemoteContext, open_remote
from gpu_actors.distributed.routing import less_loaded_of_two
from gpu_actors.distributed.worker_pool import PoolOptions, WorkerPool
from gpu_actors.errors import DeadlineExceeded, GpuActorsError
from gpu_actors.fields import expect, integer, real
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.isolation.launcher import Launcher
from gpu_actors.isolation.processes import ChildProcess
from gpu_actors.isolation.serialization import side_effect_free
from gpu_actors.kv.requests import KvCacheKeywords, KvCacheSpec
from gpu_actors.options import ContextOptions
from gpu_actors.process import Local
from gpu_actors.runtime.handle import CallOptions
from gpu_actors.runtime.reply import Reply, need_asyncio

__all__ = ["ContextPool", "answered", "open_pool"]

_KV_CACHE = CallOptions(KvCacheSpec, KvCacheKeywords)

T = TypeVar("T")
Choose = Callable[[Mapping[str, Member]], Member]

# A forward into an ``out`` has no other effect, and writes the same values when it is repeated.
_INTO_OUT = ("FlashForward", "PagedForward", "BatchedDecode")


class ContextPool(WorkerPool):
    """Several contexts as one. `open_pool` makes it, or you make it over contexts of your own.

    contexts: `GpuContext` of this process, isolated or remote ones, by name. The pool does not close these.
    retries: how often one request may be repeated.
    budget: limits the repetitions of all requests together.
    slots: how many sequences a worker should have at most.
    bound: how many times the mean load of all workers a worker's load of sequences may be.
    directory: how many pages of prompts the pool remembers with their workers, the last used ones. Give it room for all
        pages of all sequences (0.15 KiB each): a smaller directory sends sequences with the same beginning to one
        worker.
    seed: the seed of the random choices, None for any.

    Tasks of an event loop may share it. Requests may be made on several loops.
    """

    async def ask(
        self,
        request: Callable[[GpuContext], Reply[T]],
        *,
        timeout: float | None = None,
        repeatable: bool | None = None,
        choose: Choose | None = None,
    ) -> T:
        """Make a request that needs no state, on the less loaded of two workers: ``await pool.ask(lambda ctx:
        ctx.flash_attn.forward(q, k, v))``.

        If its worker is lost, leaves, or is full, another worker gets it, as often as ``retries`` and the budget allow.
        request: called with a context, once for each attempt. Returns the reply.
        timeout: seconds for all attempts together, after which it raises `DeadlineExceeded`.
        repeatable: whether the request may be repeated although it may have been carried out. None: attention,
            gradients, graphs and compiles may. Anything else, such as ``ctx.run(...)``, may not.
        choose: called with the workers that may get the request, by name. Returns one, in place of the less loaded of
            two.

        Raises what the reply raises, and `WorkerLost` if no worker is left. Cancelling the task cancels the request.
        """
        deadline = None
        if timeout is not None and timeout != math.inf:
            deadline = time.monotonic() + real("timeout", timeout, "a finite number of seconds, or None")
        message: Any = None

        async def make(member: Member) -> T:
            nonlocal message
            reply = request(member.context)
            message = reply._call.message
            member.began(reply)
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            return await answered(reply, reply.cancel, seconds, "the pool has not answered by the deadline")

        def may_repeat(_: GpuActorsError, __: Member) -> bool:
            if repeatable is not None:
                return repeatable
            return side_effect_free(message) or type(message).__name__ in _INTO_OUT

        return await self.attempt(choose or self._less_loaded, make, may_repeat)

    @_KV_CACHE
    def kv_cache(self, **options: Unpack[KvCacheKeywords]) -> PooledKvCache:
        """A paged KV cache on every worker. Each sequence lives on one of them. Enter it with ``async with``.

        The arguments are those of `KvCacheSpec`, for each worker's cache.
        """
        _KV_CACHE.check(options)
        return PooledKvCache(self, KvCacheSpec(**options))

    def _less_loaded(self, members: Mapping[str, Member]) -> Member:
        loads = {name: member.outstanding for name, member in members.items()}
        return members[less_loaded_of_two(loads, self.dice)]


async def answered(answer: Awaitable[T], cancel: Callable[[], object], seconds: float | None, late: str) -> T:
    """Await an answer for at most ``seconds``, and raise `DeadlineExceeded` after them.

    ``cancel`` is called then, and also if the task is cancelled.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await answer
    except asyncio.CancelledError:
        cancel()
        raise
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded) or not limit.expired():
            raise
        cancel()
        raise DeadlineExceeded(late) from None


class open_pool(Local):
    """Open a pool with new workers: ``async with open_pool("mock", workers=4) as pool``.

    devices: as for `open_context`. A list opens ``workers`` on each, so ["cuda:0", "cuda:1"] is one worker per GPU.
    workers: how many workers for each device.
    options: as for `open_remote`.
    workplace: makes the workplace of each worker.
    others: retries, budget, slots, bound, directory and seed, as for `ContextPool`.

    All workers open at the same time. Entering raises what `open_context` raises, and then none stays open. Leaving
    closes them.
    """

    def __init__(
        self,
        devices: str | Sequence[str] = "auto",
        *,
        workers: int = 1,
        options: ContextOptions | None = None,
        workplace: Callable[[], Launcher] = ChildProcess,
        **others: Unpack[PoolOptions],
    ) -> None:
        listed = [devices] if isinstance(devices, str) else list(devices)
        expect(bool(listed), "devices", devices, "must name at least one device")
        count = integer("workers", workers, 1)
        self._openings = [
            open_remote(device, options, workplace=workplace(), name=f"worker-{number}")
            for number, device in enumerate((one for one in listed for _ in range(count)), 1)
        ]
        self._pool = ContextPool(**others)
        self._pool._names = itertools.count(len(self._openings) + 1)

    async def __aenter__(self) -> ContextPool:
        need_asyncio("open_pool()")
        tasks = [asyncio.ensure_future(opening) for opening in self._openings]
        async with undo_on_error(_closed, tasks):
            await asyncio.gather(*tasks)
        for task in tasks:
            self._pool.add(task.result(), owned=True)
        return self._pool

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._pool.aclose()


async def _closed(tasks: Sequence[asyncio.Future[RemoteContext]]) -> None:
    for task in tasks:
        task.cancel()
    contexts = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(context.aclose() for context in contexts if isinstance(context, GpuContext)))
