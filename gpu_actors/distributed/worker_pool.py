"""WorkerPool: the workers of a pool, and attempts at a request on one worker after the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple, TypedDict, TypeVar

from gpu_actors.catching import undo_on_error
from gpu_actors.distributed.budget import RetryBudget
from gpu_actors.distributed.member import Member, WorkerStats
from gpu_actors.distributed.routing import DIRECTORY, Homes
from gpu_actors.errors import (
    ActorFailed,
    ActorStopped,
    ContextLost,
    GpuActorsError,
    InvalidRequest,
    Overloaded,
    StaleBuffer,
    WorkerLost,
)
from gpu_actors.fields import expect, integer, real
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.handles.health import Health
from gpu_actors.process import Local
from gpu_actors.runtime.reply import need_asyncio
from gpu_actors.values import show

__all__ = ["PoolOptions", "PoolStats", "WorkerPool"]

T = TypeVar("T")

# Seconds between checks of whether a worker that leaves is idle.
_IDLE_POLL_SECONDS = 0.02


class PoolStats(NamedTuple):
    """Counts of a pool.

    workers: the counts of each worker, by name.
    repeated: how many requests were repeated on another worker.
    retries_left: how many repetitions the budget allows now.
    """

    workers: Mapping[str, WorkerStats]
    repeated: int
    retries_left: float


class PoolOptions(TypedDict, total=False):
    """Keyword arguments of `ContextPool`. `open_pool` and `ray_pool` take them too."""

    retries: int
    budget: RetryBudget | None
    slots: int
    bound: float
    directory: int
    seed: int | None


class WorkerPool(Local):
    """The state that a pool and its caches share: members by name, homes of sequences, and the budget of retries."""

    def __init__(
        self,
        contexts: Mapping[str, GpuContext] | None = None,
        *,
        retries: int = 2,
        budget: RetryBudget | None = None,
        slots: int = 64,
        bound: float = 1.25,
        directory: int = DIRECTORY,
        seed: int | None = None,
    ) -> None:
        self.retries: int = integer("retries", retries, 0)
        self.budget: RetryBudget = budget if budget is not None else RetryBudget()
        expect(real("bound", bound) >= 1.0, "bound", bound, "must be a number >= 1")
        self.dice: random.Random = random.Random(seed)
        capacity = integer("directory", directory, 0)
        self.homes: Homes = Homes(self.dice, bound, integer("slots", slots, 1), capacity)
        self._members: dict[str, Member] = {}
        self._repeated = 0
        self._lock = threading.Lock()
        self._names = itertools.count(1)
        self._closed = False
        for name, context in (contexts or {}).items():
            self.add(context, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._members) or 'no workers'}>"

    # Workers

    @property
    def workers(self) -> Mapping[str, GpuContext]:
        """The contexts by name, including those that are leaving."""
        return {name: member.context for name, member in self._members.items()}

    def add(self, context: GpuContext, name: str | None = None, *, owned: bool = False) -> str:
        """Add a worker, which gets requests from now on. Returns its name.

        owned: whether the pool closes the context when the worker is removed or the pool is closed.
        Raises `InvalidRequest` for a name that another worker has.
        """
        expect(isinstance(context, GpuContext), "context", show(context), "must be an open context")
        with self._lock:
            expect(name not in self._members, "name", name, "must differ from the names of the pool's workers")
            if name is None:
                name = getattr(context, "name", None)
            while name is None or name in self._members:
                name = f"worker-{next(self._names)}"
            self._members[name] = Member(name, context, owned)
            self.homes.ring.add(name)
        return name

    async def remove(self, name: str, timeout: float | None = None) -> None:
        """Drain and remove a worker: it gets no new requests, and leaves once its requests are answered and its
        sequences freed.

        timeout: seconds (None: no limit) after which it leaves anyway. Requests with its sequences then raise
        `StaleBuffer`. Closing its context answers its open requests, and other workers repeat those that may be
        repeated.
        If the task is cancelled while it waits, the worker stays.
        Raises `InvalidRequest` for a name that no worker has.
        """
        member = self._member(name)
        member.leavers += 1
        self.homes.ring.remove(name)
        with undo_on_error(self._keep, member), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not member.idle:  # noqa: ASYNC110 (a lost generation loses its sequences without an event)
                    await asyncio.sleep(_IDLE_POLL_SECONDS)
        if self._members.get(name) is member:  # not another worker that has got its name meanwhile
            del self._members[name]
            self.homes.forget(name)
        if member.owned:
            await member.context.aclose()

    def _keep(self, member: Member) -> None:
        member.leavers -= 1
        if not member.leaving and self._members.get(member.name) is member:
            self.homes.ring.add(member.name)

    def health(self) -> Mapping[str, Health]:
        """The health of each worker."""
        return {name: member.context.health() for name, member in self._members.items()}

    @property
    def ready(self) -> bool:
        """Whether any worker accepts requests now."""
        return any(not member.leaving and member.context.health().ready for member in self._members.values())

    def stats(self) -> PoolStats:
        """The load of each worker, and how often requests were repeated."""
        workers = {name: member.stats() for name, member in self._members.items()}
        return PoolStats(workers, self._repeated, self.budget.left)

    # For the pool and its caches

    async def attempt(
        self,
        choose: Callable[[Mapping[str, Member]], Member],
        make: Callable[[Member], Awaitable[T]],
        may_repeat: Callable[[GpuActorsError, Member], bool],
    ) -> T:
        """Make a request. If it fails and may be repeated, make it again on another worker.

        choose: chooses among the members that may get the request, by name.
        make: makes the request.
        may_repeat: whether the request may be repeated although it may have been carried out.
        """
        need_asyncio("a request to a pool")
        return await self._attempt(choose, make, may_repeat)

    async def _attempt(
        self,
        choose: Callable[[Mapping[str, Member]], Member],
        make: Callable[[Member], Awaitable[T]],
        may_repeat: Callable[[GpuActorsError, Member], bool],
    ) -> T:
        # It awaits only `make`, so that the simulation of `benchmarks.fleet` can run it without an event loop.
        self.budget.request()
        tried: set[str] = set()
        for retries_left in range(self.retries, -1, -1):
            member = choose(self.candidates(tried))
            tried.add(member.name)
            try:
                return await make(member)
            except (ContextLost, ActorStopped, Overloaded, StaleBuffer) as error:
                again = _other_may_succeed(error, member) and (_not_carried_out(error) or may_repeat(error, member))
                if not retries_left or not again or not self.budget.take():
                    raise
            self._repeated += 1
        raise AssertionError

    def member(self, name: str) -> Member | None:
        """The worker with this name, None if it has left."""
        return self._members.get(name)

    async def aclose(self) -> None:
        """Close the contexts that the pool opened, each as `GpuContext.aclose` does."""
        self._closed = True
        members = list(self._members.values())
        for member in members:
            member.leavers += 1
        await asyncio.gather(*(member.context.aclose() for member in members if member.owned))

    # Inside

    def _member(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            raise InvalidRequest("name", name, f"must be a worker of the pool: {', '.join(self._members) or 'none'}")
        return member

    def candidates(self, tried: Collection[str] = ()) -> dict[str, Member]:
        """The members that may get a request: those that are ready, else those that may become ready.

        tried: members that have had the request. They are left out if there are others.
        """
        if self._closed:
            raise ActorStopped("the pool is closed")
        staying = {name: member for name, member in self._members.items() if not member.leaving}
        health = {name: member.health() for name, member in staying.items()}
        alive = {name: one for name, one in staying.items() if health[name].state not in ("failed", "stopped")}
        if not alive:
            reasons = "; ".join(f"{name}: {one.reason}" for name, one in health.items()) or "it has none"
            raise WorkerLost(f"no worker of the pool takes requests: {reasons}", 0, "", "no")
        for choice in (
            {name: one for name, one in alive.items() if health[name].ready and name not in tried},
            {name: one for name, one in alive.items() if health[name].ready},
            {name: one for name, one in alive.items() if name not in tried},
        ):
            if choice:
                return choice
        return alive


def _other_may_succeed(error: GpuActorsError, member: Member) -> bool:
    if isinstance(error, ActorFailed):
        return False  # the request itself may be the cause
    if isinstance(error, ActorStopped):
        return member.leaving or not member.context.health().ready
    return True


def _not_carried_out(error: GpuActorsError) -> bool:
    return isinstance(error, Overloaded) or (isinstance(error, WorkerLost) and error.happened == "no")
